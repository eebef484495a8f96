"""Deltas of adapters: exact to the last bit, and harmless whatever they claim."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from spotgrpo.shared import delta as module
from spotgrpo.shared.delta import apply_delta, encode_delta
from spotgrpo.shared.errors import WireError
from spotgrpo.shared.manifest import sha256_hex
from tests.tools.adapters import BYTES, safetensors_of

DTYPES = ("BF16", "F16", "F32")
MIB = 1 << 20


def adapter(values: bytes, dtype: str = "BF16") -> bytes:
    """Two tensors, the first of one element."""
    width = BYTES[dtype]
    return safetensors_of({"a": (dtype, values[:width]), "b": (dtype, values[width:])})


def version(seed: int, elements: int = 3000, dtype: str = "BF16") -> tuple[bytes, bytes]:
    """A file and its parent: half of the values a little changed."""
    random = np.random.default_rng(seed)
    width = BYTES[dtype]
    kind = f"<u{width}"
    old = random.integers(0, 1 << 8 * width, elements, dtype=np.uint64).astype(kind)
    change = random.integers(-9, 9, elements) * random.integers(0, 2, elements)
    new = old + change.astype(f"<i{width}").view(kind)
    return adapter(old.tobytes(), dtype), adapter(new.tobytes(), dtype)


def encoded(parent: bytes, new: bytes) -> bytes:
    found = encode_delta(parent, new)
    assert found is not None
    return found


PARENT, NEW = version(0)
DELTA = encoded(PARENT, NEW)
VALUES = NEW[-6000:]
HEAD = module.HEAD.size + 2 * module.LENGTH.size


def with_planes(planes: list[bytes], width: int = 2, region: int = 6000) -> bytes:
    lengths = [struct.pack("<Q", len(plane)) for plane in planes]
    return b"".join([struct.pack("<4sBB2xQ", b"SGDL", 1, width, region), *lengths, *planes])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None)
@given(st.data())
def test_any_values_come_back_to_the_last_bit(dtype: str, data: st.DataObject) -> None:
    width = BYTES[dtype]
    count = data.draw(st.integers(2, 200)) * width
    draw = st.binary(min_size=count, max_size=count)
    parent = adapter(data.draw(draw), dtype)
    new = adapter(data.draw(draw), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORTH", 100.0)  # so few values are not worth a delta
        assert apply_delta(parent, encoded(parent, new), len(new)) == new


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [2, module.BLOCK - 1, module.BLOCK, 3 * module.BLOCK + 1])
def test_every_length_is_covered(
    dtype: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORTH", 100.0)
    parent, new = version(elements, elements, dtype)
    assert apply_delta(parent, encoded(parent, new), len(new)) == new


@pytest.mark.parametrize(
    ("dtype", "kind", "nans"),
    [
        ("BF16", "<u2", [0x7FC0, 0xFFC1, 0x7F80, 0x8000, 0x7FFF, 0xFFFF, 0, 1]),
        ("F32", "<u4", [0x7FC00000, 0xFFC00001, 0x7F800000, 0x80000000, 0x7FFFFFFF, 1]),
    ],
)
def test_payloads_of_nans_and_signs_of_zeros_survive(
    dtype: str, kind: str, nans: list[int]
) -> None:
    values = np.array([*nans] * 50, dtype=kind)
    parent, new = (adapter(v.tobytes(), dtype) for v in (values, np.roll(values, 1)))
    assert apply_delta(parent, encoded(parent, new), len(new)) == new


def test_the_files_are_real_ones_and_a_small_change_is_a_small_delta(tmp_path: object) -> None:
    path = f"{tmp_path}/x.safetensors"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(NEW)
    with safe_open(path, "np") as found:
        assert list(found.keys()) == ["a", "b"]
    assert len(DELTA) < len(NEW) / 2
    assert len(encoded(NEW, NEW)) < 200


@pytest.mark.parametrize(
    "other",
    [
        safetensors_of({"a": ("BF16", VALUES[:2]), "c": ("BF16", VALUES[2:])}),  # a name
        safetensors_of({"a": ("BF16", VALUES[:4]), "b": ("BF16", VALUES[4:])}),  # a shape
        safetensors_of({"a": ("F16", VALUES[:2]), "b": ("F16", VALUES[2:])}),  # a dtype
        adapter(VALUES + bytes(2)),  # a length
        NEW + bytes(2),
        b"",
        bytes(7),
        NEW[:100],
    ],
)
def test_another_layout_has_no_delta(other: bytes) -> None:
    assert encode_delta(PARENT, other) is None
    assert encode_delta(other, NEW) is None


@pytest.mark.parametrize(
    "file",
    [
        safetensors_of({"a": ("BF16", bytes(40)), "b": ("F32", bytes(4000))}),
        safetensors_of({"a": ("I8", bytes(4000))}),
        safetensors_of({}),
        safetensors_of({"a": ("BF16", bytes(0))}),
        safetensors_of({"a": ("BF16", bytes(4000))})[:-1],
        b'{"not": "safetensors"}' * 10,
        (4).to_bytes(8, "little") + b"[1]]" + bytes(400),
        (4).to_bytes(8, "little") + b"[[1]" + bytes(400),
        (8).to_bytes(8, "little") + b'{"a": 1}' + bytes(400),
    ],
)
def test_what_is_no_adapter_of_floats_of_one_width_has_no_delta(file: bytes) -> None:
    assert encode_delta(file, file) is None


def test_values_that_have_nothing_in_common_have_no_delta() -> None:
    random = np.random.default_rng(0)
    parent, new = (adapter(random.bytes(6000)) for _ in range(2))
    assert encode_delta(parent, new) is None


def test_any_truncation_is_refused() -> None:
    for cut in (*range(HEAD + 20), *range(HEAD + 20, len(DELTA), 97), len(DELTA) - 1):
        with pytest.raises(WireError):
            apply_delta(PARENT, DELTA[:cut], len(NEW))
    with pytest.raises(WireError):
        apply_delta(PARENT, DELTA + b"x", len(NEW))


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(DELTA) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_found_by_the_digest(at: int, by: int) -> None:
    flipped = bytearray(DELTA)
    flipped[at] ^= by
    try:
        found = apply_delta(PARENT, bytes(flipped), len(NEW))
    except WireError:
        return
    unused = module.HEAD.unpack(flipped[: module.HEAD.size]) == module.HEAD.unpack_from(DELTA)
    assert sha256_hex(found) != sha256_hex(NEW) or unused


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.integers(0, HEAD + 30))
def test_random_bytes_never_pass_for_the_file(body: bytes, kept: int) -> None:
    try:
        found = apply_delta(PARENT, DELTA[:kept] + body, len(NEW))
    except WireError:
        return
    assert found != NEW


def test_another_parent_gives_another_file() -> None:
    stranger, _ = version(1)
    assert apply_delta(stranger, DELTA, len(NEW)) != NEW


@pytest.mark.parametrize(
    ("parent", "size"),
    [(PARENT, len(NEW) + 2), (PARENT, 0), (b"", len(NEW)), (b"", 0), (adapter(bytes(4000)), 4112)],
)
def test_a_file_of_another_size_is_refused(parent: bytes, size: int) -> None:
    with pytest.raises(WireError):
        apply_delta(parent, DELTA, size)


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"X"), (4, b"\0"), (4, b"\2"), (5, b"\0"), (5, b"\3"), (5, b"\4")]
)
def test_another_schema_or_width_is_refused(at: int, value: bytes) -> None:
    with pytest.raises(WireError):
        apply_delta(PARENT, DELTA[:at] + value + DELTA[at + 1 :], len(NEW))


def unsized(data: bytes) -> bytes:
    """A frame that does not say how long its content is."""
    writer = zstandard.ZstdCompressor(level=1, write_content_size=False)
    return writer.compress(data)


def lying(claimed: int, data: bytes, window_log: int = 13) -> bytes:
    """A frame of one raw block that claims another length, and a window."""
    head = struct.pack("<IBBI", 0xFD2FB528, 0b10000000, (window_log - 10) << 3, claimed)
    return head + (len(data) << 3 | 1).to_bytes(3, "little") + data


GOOD = zstandard.ZstdCompressor().compress(bytes(3000))
HOSTILE = {
    "more than its plane": zstandard.ZstdCompressor().compress(bytes(500 * MIB)),
    "of unknown length": unsized(bytes(500 * MIB)),
    "less than its plane": zstandard.ZstdCompressor().compress(bytes(2999)),
    "claims too little": lying(3000, bytes(4000)),
    "claims too much": lying(3000, bytes(2000)),
    "a wide window": lying(3000, bytes(3000), window_log=31),
    "two frames": GOOD + GOOD,
    "nothing": b"",
    "rubbish": bytes(range(256)),
}


@pytest.mark.parametrize("plane", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_plane_is_refused_in_little_memory(plane: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            apply_delta(PARENT, with_planes([GOOD, plane]), len(NEW))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(plane) + MIB


def test_the_hostile_planes_are_refused_for_themselves() -> None:
    """The same delta with planes as they should be is applied."""
    assert apply_delta(PARENT, with_planes([GOOD, GOOD]), len(NEW)) == PARENT
    assert lying(3000, bytes(3000)) != GOOD
    assert apply_delta(PARENT, with_planes([GOOD, lying(3000, bytes(3000))]), len(NEW)) == PARENT


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_plane_that_ends_elsewhere_is_refused(length: int) -> None:
    body = bytearray(DELTA)
    struct.pack_into("<Q", body, module.HEAD.size, length)
    with pytest.raises(WireError):
        apply_delta(PARENT, bytes(body), len(NEW))
