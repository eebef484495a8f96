"""The JSON objects of a run: what is written is read back, and what is not theirs is refused."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.manifest import (
    MAX_JSON_BYTES,
    SCHEMA,
    DataIdentity,
    DeltaEntry,
    Document,
    Durable,
    FileEntry,
    Latest,
    LoraIdentity,
    Manifest,
    ModelIdentity,
    Probe,
    RewardIdentity,
    RunDocument,
    SamplingDocument,
    Serving,
    sha256_hex,
)

SHA = "ab" * 32

LATEST = Latest(
    epoch=3,
    writer="w",
    nonce="n",
    serving=Serving(
        version=42, epoch=3, manifest="r/versions/v00000042.e0003/manifest.json", sha256=SHA
    ),
    durable=Durable(
        version=41,
        epoch=2,
        manifest="r/versions/v00000041.e0002/manifest.json",
        manifest_sha256=SHA,
        state="r/states/v00000041.e0002.safetensors",
        state_sha256=SHA,
        ledger="r/ledger/00000057.e0003.msgpack",
        ledger_sha256=SHA,
    ),
    step_s=1.25,
)
MANIFEST = Manifest(
    run="r",
    version=42,
    epoch=3,
    parent="v00000041.e0002",
    files=[FileEntry(name="adapter_config.json", size=12, sha256=SHA)],
    modules=56,
    base_sha256=SHA,
    probe=Probe(token_ids=[1, 2, 3], version_logprobs=[-1.5, -2.0], base_logprobs=[-1.25, -2.5]),
    created_at=1.5,
    delta=DeltaEntry(
        name="adapter_model.delta", size=7, sha256=SHA, parent="v00000041.e0002", parent_sha256=SHA
    ),
)
RUN = RunDocument(
    run="r",
    model=ModelIdentity(name="m", revision=None, base_sha256=SHA, tokenizer_sha256=SHA),
    lora=LoraIdentity(rank=16, alpha=32.0, target_modules=["q_proj"]),
    data=DataIdentity(source="d.jsonl", sha256=SHA, rows=10, shuffle_seed=0),
    rewards=[RewardIdentity(function="m:f", weight=1.0, sha256=SHA)],
    sampling=SamplingDocument(group_size=8, max_new_tokens=64, temperature=1.0),
    max_staleness=2,
    dtype="float32",
    max_context=2048,
    wire_schemas=(1, 1),
    created_at=1.5,
)
DOCUMENTS: list[Document] = [LATEST, MANIFEST, RUN]


def named(document: object) -> str:
    return type(document).__name__


def changed(document: Document, place: tuple[str | int, ...], value: Any) -> bytes:
    """The document's JSON with another value at ``place``."""
    found = json.loads(document.to_bytes())
    inner = found
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return json.dumps(found).encode()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_a_document_is_read_back_as_it_was_written(document: Document) -> None:
    assert type(document).from_bytes(document.to_bytes()) == document
    assert json.loads(document.to_bytes())["schema"] == SCHEMA


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_equal_values_give_equal_bytes(document: Document) -> None:
    again = type(document).from_bytes(document.to_bytes())
    assert again.to_bytes() == document.to_bytes()


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_fields_that_a_newer_learner_adds_are_passed_over(document: Document) -> None:
    assert type(document).from_bytes(changed(document, ("added_in_2",), [1])) == document


def test_a_version_may_offer_no_delta() -> None:
    found = json.loads(MANIFEST.to_bytes())
    del found["delta"]
    assert Manifest.from_bytes(json.dumps(found).encode()).delta is None


@pytest.mark.parametrize("schema", [0, SCHEMA + 1, -1, "one", None, 1.5])
@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_another_schema_is_refused(document: Document, schema: Any) -> None:
    with pytest.raises(WireError, match="schema"):
        type(document).from_bytes(changed(document, ("schema",), schema))


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_any_truncation_is_refused(document: Document) -> None:
    body = document.to_bytes()
    for cut in range(len(body)):
        with pytest.raises(WireError):
            type(document).from_bytes(body[:cut])


@settings(deadline=None)
@given(st.sampled_from(DOCUMENTS), st.binary(max_size=60))
def test_random_bytes_are_refused(document: Document, body: bytes) -> None:
    with pytest.raises(WireError):
        type(document).from_bytes(body)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(DOCUMENTS), st.data())
def test_a_document_with_any_byte_changed_is_refused_or_still_valid(
    document: Document, data: st.DataObject
) -> None:
    body = bytearray(document.to_bytes())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = type(document).from_bytes(bytes(body))
    except WireError:
        return
    assert type(document).from_bytes(found.to_bytes()) == found


@pytest.mark.parametrize(
    ("document", "place", "value"),
    [
        (LATEST, ("epoch",), 0),
        (LATEST, ("nonce",), None),
        (LATEST, ("serving",), None),
        (LATEST, ("serving", "sha256"), "AB" * 32),
        (LATEST, ("serving", "sha256"), "ab" * 31),
        (LATEST, ("serving", "sha256"), "ab" * 32 + "\n"),
        (LATEST, ("serving", "version"), -1),
        (LATEST, ("durable", "epoch"), 0),
        (LATEST, ("step_s",), "soon"),
        (MANIFEST, ("files", 0, "name"), "../adapter"),
        (MANIFEST, ("files", 0, "name"), "/etc/passwd"),
        (MANIFEST, ("files", 0, "name"), "a/b"),
        (MANIFEST, ("files", 0, "name"), ".hidden"),
        (MANIFEST, ("files", 0, "name"), ".."),
        (MANIFEST, ("files", 0, "name"), ""),
        (MANIFEST, ("files", 0, "name"), "a\n"),
        (MANIFEST, ("files", 0, "name"), "a" * 101),
        (MANIFEST, ("files", 0, "size"), -1),
        (MANIFEST, ("files",), [{"name": "a", "size": 1, "sha256": SHA}] * 65),
        (MANIFEST, ("delta", "name"), "../adapter"),
        (MANIFEST, ("delta", "size"), -1),
        (MANIFEST, ("delta", "parent_sha256"), None),
        (MANIFEST, ("modules",), -1),
        (MANIFEST, ("probe", "token_ids"), [1]),
        (MANIFEST, ("probe", "token_ids"), [1, -2]),
        (MANIFEST, ("probe", "token_ids"), [1] * 4097),
        (MANIFEST, ("probe", "version_logprobs"), ["x"]),
        (MANIFEST, ("base_sha256",), ""),
        (RUN, ("rewards",), None),
        (RUN, ("wire_schemas",), [1]),
        (RUN, ("model", "base_sha256"), "x"),
    ],
    ids=lambda case: "" if isinstance(case, Document) else repr(case)[:40],
)
def test_a_wrong_field_is_refused_and_named(
    document: Document, place: tuple[str | int, ...], value: Any
) -> None:
    with pytest.raises(WireError, match=str(place[0])):
        type(document).from_bytes(changed(document, place, value))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(text: str) -> None:
    body = changed(LATEST, ("step_s",), 0.125).replace(b"0.125", text.encode())
    with pytest.raises(WireError):
        Latest.from_bytes(body)


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"a":' * 200_000, b"[]", b"null", b"1", b'"x"', b"\xff\xfe{}"]
)
def test_hostile_json_is_refused(body: bytes) -> None:
    for document in DOCUMENTS:
        with pytest.raises(WireError):
            type(document).from_bytes(body)


def test_a_document_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="over the limit"):
        Latest.from_bytes(b" " * (MAX_JSON_BYTES + 1))


def test_a_document_full_of_rubbish_takes_little_memory() -> None:
    body = changed(LATEST, ("rubbish",), [[]] * 100_000)
    tracemalloc.start()
    assert Latest.from_bytes(body) == LATEST
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (1 << 20) + 32 * len(body)


def test_an_error_shows_no_more_than_a_line() -> None:
    with pytest.raises(WireError) as caught:
        Latest.from_bytes(changed(LATEST, ("epoch",), "x" * 10_000))
    assert len(str(caught.value)) < 200


def test_versions_of_documents_are_told_apart_by_epoch() -> None:
    assert LATEST.serving.policy == PolicyVersion(epoch=3, number=42) == MANIFEST.policy
    assert LATEST.durable.policy == PolicyVersion(epoch=2, number=41)


def test_the_digest_is_sha256() -> None:
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
