"""The messages: golden bytes, round trips, and that no body can do more harm than a WireError."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotgrpo.shared import wire
from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.packed import DEEPEST, Limits, check_shape
from tests.tools.wire_samples import (
    GROUP,
    PARTIAL,
    REPORT,
    SAMPLES,
    TASK,
    golden_path,
    partial_rollout,
    rollout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = sorted(SAMPLES)
MIB = 1 << 20


def same(one: Any, other: Any) -> bool:
    """Equality that looks into arrays and into dataclasses that hold some."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool(np.array_equal(one, other))
    if is_dataclass(one):
        names = [part.name for part in fields(one)]
        return type(one) is type(other) and all(
            same(getattr(one, n), getattr(other, n)) for n in names
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def golden(kind: str) -> bytes:
    return bytes.fromhex(golden_path(kind).read_text())


def decoded_or_refused(kind: str, body: bytes) -> Any:
    """What the decoder makes of ``body``; None where it is a WireError. Anything else it raises fails the test."""
    try:
        return SAMPLES[kind][2](body)
    except WireError:
        return None


# ---- golden bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_gives_the_golden_bytes(kind: str) -> None:
    value, encode, _ = SAMPLES[kind]
    assert encode(value) == golden(kind), "the wire has changed: that needs a new schema number"


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_reads_the_golden_bytes(kind: str) -> None:
    value, _, decode = SAMPLES[kind]
    assert same(decode(golden(kind)), value)


def test_the_golden_samples_set_every_field() -> None:
    for value in (TASK, GROUP, PARTIAL, REPORT, GROUP.sampling):
        for part in fields(value):
            if part.name != "kind":
                found = getattr(value, part.name)
                assert len(found) if isinstance(found, np.ndarray) else found, part.name


# ---- round trips ------------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
jsons = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
rows = st.dictionaries(texts, jsons, max_size=4)
task_ids = st.builds(TaskId, st.integers(0, 10**12 - 1), st.integers(1, 9999))
versions = st.builds(
    PolicyVersion, epoch=st.integers(1, 10**9 - 1), number=st.integers(0, 10**12 - 1)
)
samplings = st.builds(
    wire.Sampling,
    max_new_tokens=st.integers(1, wire.MAX_TOKENS),
    temperature=st.floats(0, 100),
    stop=st.lists(texts, max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@st.composite
def rollouts(draw: st.DrawFn) -> wire.Rollout:
    tokens = draw(st.integers(1, 6))
    first = draw(st.integers(1, tokens))
    parts = draw(st.dictionaries(texts, st.none() | st.floats(-9, 9), max_size=2))
    runs = [wire.VersionRun(draw(versions), first)]
    if first < tokens:
        runs.append(wire.VersionRun(draw(versions), tokens - first))
    return wire.Rollout(
        token_ids=np.array(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)), np.int32
        ),
        logprobs=np.array(
            draw(st.lists(st.floats(-99, 0, width=32), min_size=tokens, max_size=tokens)),
            np.float32,
        ),
        loss_mask=np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))),
        versions=tuple(runs),
        reward=draw(st.none() | st.floats(-9, 9)),
        reward_parts=parts,
        finish=draw(st.sampled_from(["stop", "length"])),
    )


@st.composite
def partial_rollouts(draw: st.DrawFn) -> wire.PartialRollout:
    whole = draw(rollouts())
    tokens = draw(st.integers(0, len(whole.token_ids)))
    runs = whole.versions if tokens == len(whole.token_ids) else ()
    if tokens and not runs:
        runs = (wire.VersionRun(draw(versions), tokens),)
    return wire.PartialRollout(
        seed=draw(st.integers(0, 2**63 - 1)),
        token_ids=whole.token_ids[:tokens],
        logprobs=whole.logprobs[:tokens],
        versions=runs,
        finish=whole.finish if runs == whole.versions else None,
    )


tasks = st.builds(
    wire.Task,
    run=st.just("r"),
    task_id=task_ids,
    prompt_ids=token_ids.map(tuple),
    prompt=texts | st.lists(rows, min_size=1, max_size=2),
    row=rows,
    sampling=samplings,
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4).map(tuple),
    min_version=st.integers(0, 2**40),
    pinned=st.none() | versions,
    kind=st.sampled_from(["train", "eval"]),
)
groups = st.builds(
    wire.Group,
    run=st.just("r"),
    task_id=task_ids,
    worker=texts,
    engine=texts,
    engine_version=texts,
    manifest_sha256=st.just("0" * 64),
    prompt_ids=token_ids.map(lambda ids: np.array(ids, np.int32)),
    row=rows,
    sampling=samplings,
    rollouts=st.lists(rollouts(), min_size=1, max_size=3).map(tuple),
    kind=st.sampled_from(["train", "eval"]),
    started_at=st.floats(0, 1e10),
    generated_at=st.floats(0, 1e10),
    scored_at=st.floats(0, 1e10),
)


partials = st.builds(
    wire.Partial,
    run=st.just("r"),
    task_id=task_ids,
    worker=texts,
    prompt_ids=token_ids.map(lambda ids: np.array(ids, np.int32)),
    sampling=samplings.map(lambda one: replace(one, max_new_tokens=one.max_new_tokens + 5)).filter(
        lambda one: one.max_new_tokens <= wire.MAX_TOKENS
    ),
    rollouts=st.lists(partial_rollouts(), min_size=1, max_size=3).map(tuple),
    saved_at=st.floats(0, 1e10),
)


@settings(deadline=None)
@given(tasks)
def test_a_task_comes_back_as_it_went(task: wire.Task) -> None:
    assert wire.decode_task(wire.encode_task(task)) == task


@settings(deadline=None)
@given(groups)
def test_a_group_comes_back_as_it_went(group: wire.Group) -> None:
    assert same(wire.decode_group(wire.encode_group(group)), group)


@settings(deadline=None)
@given(partials)
def test_a_partial_comes_back_as_it_went(partial: wire.Partial) -> None:
    assert same(wire.decode_partial(wire.encode_partial(partial)), partial)


def test_a_long_group_comes_back_as_it_went() -> None:
    group = replace(GROUP, rollouts=tuple(rollout(20_000) for _ in range(64)))
    body = wire.encode_group(group)
    assert same(wire.decode_group(body), group)
    assert len(body) < 64 * 20_000 * 9 + 64 * 500, (
        "an id, a logprob and a mask take nine bytes a token"
    )


def test_fields_that_a_newer_learner_adds_are_passed_over() -> None:
    payload = {**unpacked(TASK), "new_in_2": [1, {"a": None}]}
    assert wire.decode_task(wire.pack_body("task", payload)) == TASK


def test_a_report_with_a_broken_number_still_tells_the_others() -> None:
    report = replace(REPORT, values={"loss": float("nan"), "norm": float("inf"), "step": 3})
    assert wire.decode_report(wire.encode_report(report)).values == {
        "loss": None,
        "norm": None,
        "step": 3,
    }


@pytest.mark.parametrize(
    "value", [float("nan"), float("-inf"), b"bytes", np.float32(1), 2**64, object(), {1: 2}, (1,)]
)
def test_a_task_that_cannot_be_read_is_not_sent(value: object) -> None:
    task = replace(TASK, row={"column": value})  # type: ignore[dict-item]
    with pytest.raises(WireError):
        wire.encode_task(task)


# ---- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_any_truncation_is_refused(kind: str) -> None:
    body = golden(kind)
    assert [
        cut for cut in range(len(body)) if decoded_or_refused(kind, body[:cut]) is not None
    ] == []


@pytest.mark.parametrize("kind", KINDS)
def test_any_flip_of_one_bit_is_refused(kind: str) -> None:
    body = golden(kind)
    accepted = []
    for at in range(len(body)):
        for bit in range(8):
            damaged = bytearray(body)
            damaged[at] ^= 1 << bit
            if decoded_or_refused(kind, bytes(damaged)) is not None:
                accepted.append((at, bit))
    assert accepted == []


@pytest.mark.parametrize("kind", KINDS)
def test_anything_behind_the_end_is_refused(kind: str) -> None:
    for tail in (b"\x00", b"\xc0", golden(kind)):
        assert decoded_or_refused(kind, golden(kind) + tail) is None


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_random_bytes_are_refused(kind: str, body: bytes) -> None:
    assert decoded_or_refused(kind, body) is None


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_random_bytes_under_a_right_digest_are_refused(kind: str, payload: bytes) -> None:
    assert decoded_or_refused(kind, sealed(kind, payload)) is None


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_payload_with_any_byte_changed_is_refused_or_still_valid(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    value, encode, decode = SAMPLES[kind]
    payload = bytearray(msgpack.unpackb(encode(value))["payload"])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    found = decoded_or_refused(kind, sealed(kind, bytes(payload)))
    if found is not None:
        assert same(decode(encode(found)), found), (
            "what is taken in is a whole value that can be sent on"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_of_another_kind_is_refused(kind: str) -> None:
    for other in KINDS:
        if other != kind:
            with pytest.raises(WireError, match=kind):
                SAMPLES[kind][2](golden(other))


@pytest.mark.parametrize("schema", [0, wire.SCHEMA + 1, -1, 2**63, True, None, "1", 1.0])
def test_a_schema_out_of_range_is_refused(schema: Any) -> None:
    outer = msgpack.unpackb(golden("task"))
    packed = outer["payload"]
    body = wire.pack_body("task", msgpack.unpackb(packed), schema=schema)
    with pytest.raises(WireError, match="schema"):
        wire.decode_task(body)


# ---- bodies that are well formed and wrong ----------------------------------------------------------------------


def unpacked(value: Any) -> dict[str, Any]:
    """The payload of a message as plain values."""
    encode = next(encode for sample, encode, _ in SAMPLES.values() if type(sample) is type(value))
    found: dict[str, Any] = msgpack.unpackb(msgpack.unpackb(encode(value))["payload"])
    return found


def sealed(kind: str, payload: bytes) -> bytes:
    """A body whose digest is right for any payload: what a malicious sender can make."""
    outer = msgpack.unpackb(wire.pack_body(kind, {}))
    outer |= {"payload": payload, "sha256": wire._digest(wire.SCHEMA, kind, payload)}
    body: bytes = msgpack.packb(outer)
    return body


def int32(*values: int) -> dict[str, Any]:
    return wire.pack_array(np.array(values), "int32")


WRONG_TASKS: list[tuple[str, Any]] = [
    ("run", 1),
    ("run", "r" * 65),
    ("task", "00000001.0"),
    ("task", "1.1"),
    ("task", "00000001.01"),
    ("task", "٠٠٠٠٠٠٠١.1"),
    ("task", "00000001.1\n"),
    ("kind", "test"),
    ("prompt_ids", int32(-1)),
    ("prompt_ids", {"dtype": "<i8", "data": bytes(8)}),
    ("prompt_ids", {"dtype": ">i4", "data": bytes(4)}),
    ("prompt_ids", {"dtype": "|O", "data": bytes(8)}),
    ("prompt_ids", {"dtype": "<i4", "data": bytes(5)}),
    ("prompt_ids", {"dtype": "<i4", "data": "text"}),
    ("prompt_ids", [1, 2]),
    ("prompt", 1),
    ("prompt", []),
    ("prompt", ["text"]),
    ("row", []),
    ("row", {"x": float("nan")}),
    ("row", {"x": b"bytes"}),
    ("row", {b"x": 1}),
    ("sampling", {}),
    ("seeds", []),
    ("seeds", [-1]),
    ("seeds", [2**63]),
    ("seeds", [1.0]),
    ("seeds", [True]),
    ("seeds", [0] * (wire.MAX_GROUP_SIZE + 1)),
    ("min_version", -1),
    ("min_version", 2**63),
    ("min_version", None),
    ("pinned", "v1.e1"),
    ("pinned", 7),
]
WRONG_SAMPLINGS: list[tuple[str, Any]] = [
    ("max_new_tokens", 0),
    ("max_new_tokens", wire.MAX_TOKENS + 1),
    ("temperature", -0.1),
    ("temperature", float("inf")),
    ("temperature", float("nan")),
    ("stop", "text"),
    ("stop", [1]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**31]),
    ("stop_token_ids", [0] * 257),
]
WRONG_ROLLOUTS: list[tuple[str, Any]] = [
    ("token_ids", int32(1)),
    ("token_ids", int32()),
    ("token_ids", int32(1, -2)),
    ("logprobs", wire.pack_array(np.array([-1.0]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, np.nan]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, -np.inf]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, 0.5]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, -1.0]), "float64")),
    ("loss_mask", wire.pack_array(np.array([1, 2]), "uint8")),
    ("loss_mask", wire.pack_array(np.array([1]), "uint8")),
    ("versions", []),
    ("versions", [{"epoch": 1, "version": 1, "tokens": 1}]),
    ("versions", [{"epoch": 1, "version": 1, "tokens": 3}]),
    ("versions", [{"epoch": 0, "version": 1, "tokens": 2}]),
    ("versions", [{"epoch": 1, "version": -1, "tokens": 2}]),
    (
        "versions",
        [{"epoch": 1, "version": 1, "tokens": 0}, {"epoch": 1, "version": 1, "tokens": 2}],
    ),
    ("reward", float("nan")),
    ("reward", "1"),
    ("reward", True),
    ("reward_parts", {"x": float("inf")}),
    ("reward_parts", {b"x": 1.0}),
    ("reward_parts", {1: 1.0}),
    ("finish", "abort"),
]


WRONG_PARTIALS: list[tuple[str, Any]] = [
    ("run", "r" * 65),
    ("task", "1.1"),
    ("task", None),
    ("worker", "w" * 257),
    ("prompt_ids", int32(-1)),
    ("prompt_ids", [1, 2]),
    ("sampling", {}),
    ("sampling", {**wire.pack_sampling(PARTIAL.sampling), "max_new_tokens": 6}),  # one has 7
    ("rollouts", []),
    ("rollouts", [1]),
    ("rollouts", {}),
    ("saved_at", float("nan")),
    ("saved_at", "1"),
]
WRONG_PARTIAL_ROLLOUTS: list[tuple[str, Any]] = [
    ("seed", -1),
    ("seed", 2**63),
    ("seed", True),
    ("token_ids", int32(1, 2)),
    ("token_ids", int32()),
    ("token_ids", int32(1, 2, -3)),
    ("token_ids", {"dtype": "<i8", "data": bytes(24)}),
    ("logprobs", wire.pack_array(np.array([-1.0, -1.0]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, -1.0, np.nan]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, -1.0, -np.inf]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, -1.0, 0.5]), "float32")),
    ("logprobs", wire.pack_array(np.array([-1.0, -1.0, -1.0]), "float64")),
    ("versions", []),
    ("versions", [{"epoch": 1, "version": 1, "tokens": 2}]),
    ("versions", [{"epoch": 1, "version": 1, "tokens": 4}]),
    ("versions", [{"epoch": 0, "version": 1, "tokens": 3}]),
    ("versions", [{"epoch": 1, "version": -1, "tokens": 3}]),
    (
        "versions",
        [{"epoch": 1, "version": 1, "tokens": 0}, {"epoch": 1, "version": 1, "tokens": 3}],
    ),
    ("finish", "abort"),
    ("finish", 1),
]


def shown(case: object) -> str:
    return repr(case)[:50]


@pytest.mark.parametrize(("name", "value"), WRONG_TASKS, ids=shown)
def test_a_task_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    body = wire.pack_body("task", {**unpacked(TASK), name: value})
    with pytest.raises(WireError):
        wire.decode_task(body)


@pytest.mark.parametrize("name", [part for part in unpacked(TASK) if part != "pinned"])
def test_a_task_that_lacks_a_field_is_refused(name: str) -> None:
    payload = unpacked(TASK)
    del payload[name]
    with pytest.raises(WireError, match="missing"):
        wire.decode_task(wire.pack_body("task", payload))


@pytest.mark.parametrize(("name", "value"), WRONG_SAMPLINGS, ids=shown)
def test_sampling_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    payload = unpacked(TASK)
    payload["sampling"][name] = value
    with pytest.raises(WireError):
        wire.decode_task(wire.pack_body("task", payload))


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_sampling_from_another_distribution_is_refused_and_not_passed_over(name: str) -> None:
    payload = unpacked(TASK)
    payload["sampling"][name] = 0.9
    with pytest.raises(WireError, match=rf"sampling\.{name} is not known here"):
        wire.decode_task(wire.pack_body("task", payload))


@pytest.mark.parametrize(("name", "value"), WRONG_ROLLOUTS, ids=shown)
def test_a_rollout_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    payload = unpacked(GROUP)
    payload["rollouts"][0][name] = value
    with pytest.raises(WireError):
        wire.decode_group(wire.pack_body("group", payload))


@pytest.mark.parametrize("rollouts", [[], [1], {}, [[]]])
def test_a_group_without_rollouts_is_refused(rollouts: Any) -> None:
    with pytest.raises(WireError):
        wire.decode_group(wire.pack_body("group", {**unpacked(GROUP), "rollouts": rollouts}))


@pytest.mark.parametrize(("name", "value"), WRONG_PARTIALS, ids=shown)
def test_a_partial_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    body = wire.pack_body("partial", {**unpacked(PARTIAL), name: value})
    with pytest.raises(WireError):
        wire.decode_partial(body)


@pytest.mark.parametrize("name", unpacked(PARTIAL))
def test_a_partial_that_lacks_a_field_is_refused(name: str) -> None:
    payload = unpacked(PARTIAL)
    del payload[name]
    with pytest.raises(WireError, match="missing"):
        wire.decode_partial(wire.pack_body("partial", payload))


@pytest.mark.parametrize(("name", "value"), WRONG_PARTIAL_ROLLOUTS, ids=shown)
def test_a_rollout_of_a_partial_with_a_wrong_field_is_refused(name: str, value: Any) -> None:
    payload = unpacked(PARTIAL)
    payload["rollouts"][0][name] = value
    with pytest.raises(WireError):
        wire.decode_partial(wire.pack_body("partial", payload))


@pytest.mark.parametrize("name", unpacked(PARTIAL)["rollouts"][0])
def test_a_rollout_of_a_partial_that_lacks_a_field_is_refused(name: str) -> None:
    payload = unpacked(PARTIAL)
    del payload["rollouts"][0][name]
    with pytest.raises(WireError, match="missing"):
        wire.decode_partial(wire.pack_body("partial", payload))


def test_a_rollout_that_ended_before_its_first_token_is_refused() -> None:
    empty = partial_rollout(0, 0, "stop")
    with pytest.raises(WireError, match="0 tokens"):
        wire.decode_partial(wire.encode_partial(replace(PARTIAL, rollouts=(empty,))))


# ---- hostile msgpack --------------------------------------------------------------------------------------------

MANY = 1 << 16


def claiming(head: int, count: int) -> bytes:
    """The head of a list or map of ``count`` elements."""
    return bytes([head]) + count.to_bytes(4, "big")


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a_scalar": b"\x01",
    "deep_lists": b"\x91" * 100_000 + b"\xc0",
    "deep_maps": b"\x81\xa1k" * 100_000 + b"\xc0",
    "a_list_that_claims_four_billion": claiming(0xDD, 2**32 - 1),
    "a_map_that_claims_four_billion": claiming(0xDF, 2**32 - 1),
    "a_text_that_claims_four_billion": claiming(0xDB, 2**32 - 1),
    "bytes_that_claim_four_billion": claiming(0xC6, 2**32 - 1),
    "lists_that_each_claim_the_whole_body": claiming(0xDD, 900_000) * 20_000 + bytes(1_000_000),
    "millions_of_empty_lists": claiming(0xDD, 1 << 21) + b"\x90" * (1 << 21),
    "millions_of_empty_maps": claiming(0xDD, 1 << 21) + b"\x80" * (1 << 21),
    "as_many_empty_maps_as_are_allowed": claiming(0xDD, MANY - 100) + b"\x80" * (MANY - 100),
    "many_short_texts": claiming(0xDD, MANY) + b"\xa2ab" * MANY,
    "many_small_numbers": claiming(0xDD, MANY) + b"\xcd\x7f\xff" * MANY,
    "many_short_bytes": claiming(0xDD, MANY) + b"\xc4\x02ab" * MANY,
    "many_keys": claiming(0xDF, MANY)
    + b"".join(msgpack.packb(f"{n:x}") + b"\x00" for n in range(MANY)),
    "duplicate_keys": b"\x82\xa1a\x01\xa1a\x02",
    "a_key_that_is_a_list": b"\x81\x90\x01",
    "a_key_that_is_a_number": b"\x81\x01\x01",
    "a_key_that_is_bytes": b"\x81\xc4\x01a\x01",
    "a_timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "an_extension": b"\xc7\x05\x07hello",
    "an_extension_in_a_map": b"\x81\xa1a\xd4\x07\x00",
    "text_that_is_not_utf8": b"\x81\xa1\xff\x01",
    "the_byte_that_is_never_used": b"\xc1",
    "not_a_number": b"\xcb\x7f\xf8" + bytes(6),
    "two_values": b"\x80\x80",
}
VALID_IN_A_ROW = {
    "a_scalar",
    "as_many_empty_maps_as_are_allowed",
    "many_short_texts",
    "many_small_numbers",
    "many_keys",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_payload_is_refused_within_little_memory(name: str) -> None:
    assert decoded_within(wire.decode_group, sealed("group", HOSTILE[name])) is None


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_body_is_refused_within_little_memory(name: str) -> None:
    assert decoded_within(wire.decode_group, HOSTILE[name]) is None


@pytest.mark.parametrize("name", sorted(set(HOSTILE) - {"nothing"}))
def test_a_hostile_row_takes_little_memory(name: str) -> None:
    packed = msgpack.packb({**unpacked(TASK), "row": {"column": 0}})
    column = msgpack.packb("column")
    body = sealed("task", packed.replace(column + b"\x00", column + HOSTILE[name]))
    assert (decoded_within(wire.decode_task, body) is not None) == (name in VALID_IN_A_ROW)


def decoded_within(decode: Callable[[bytes], Any], body: bytes) -> Any:
    """The decoded value or None for a WireError; fails where decoding took more than 32 times the body and 8 MiB.

    The least of three measurements: what threads of earlier tests allocate meanwhile can only add to one.
    """
    found, peak = min(
        (decoded_with_peak(decode, body) for _ in range(3)), key=lambda measured: measured[1]
    )
    assert peak < 8 * MIB + 32 * len(body), (
        f"{peak / MIB:.1f} MiB for a body of {len(body) / MIB:.3f}"
    )
    return found


def decoded_with_peak(decode: Callable[[bytes], Any], body: bytes) -> tuple[Any, int]:
    """The decoded value or None, and the most bytes that were allocated meanwhile."""
    gc.collect()
    tracemalloc.start()
    try:
        found = decode(body)
    except WireError:
        found = None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return found, peak


def test_a_body_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="over the limit"):
        wire.decode_task(bytes(wire.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(WireError, match="over the limit"):
        wire.decode_report(bytes(MIB + 1))


# ---- the walk over a body's shape -------------------------------------------------------------------------------

LIMITS = Limits(items=1000, containers=100)
values = st.recursive(
    scalars | texts | st.binary(max_size=300) | st.text("x", min_size=30, max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(texts, inner, max_size=20),
    max_leaves=30,
)


@settings(deadline=None)
@given(values)
def test_the_walk_takes_what_msgpack_packs(value: Any) -> None:
    check_shape(msgpack.packb(value), Limits(items=10_000, containers=10_000))


@settings(deadline=None, max_examples=500)
@given(st.binary(max_size=30))
def test_what_the_walk_takes_msgpack_can_cut_out(body: bytes) -> None:
    try:
        check_shape(body, LIMITS)
    except WireError:
        return
    try:
        msgpack.unpackb(body, raw=True, strict_map_key=False)
    except TypeError:  # a map whose key is a list: refused by whoever unpacks
        return


def test_the_walk_stops_at_its_limits() -> None:
    check_shape(msgpack.packb([0] * 999), LIMITS)
    with pytest.raises(WireError, match="1000 values"):
        check_shape(msgpack.packb([0] * 1000), LIMITS)
    check_shape(msgpack.packb([[]] * 99), LIMITS)
    with pytest.raises(WireError, match="100 lists and maps"):
        check_shape(msgpack.packb([[]] * 100), LIMITS)
    check_shape(b"\x91" * (DEEPEST - 1) + b"\xc0", LIMITS)
    with pytest.raises(WireError, match="deeper"):
        check_shape(b"\x91" * DEEPEST + b"\xc0", LIMITS)
