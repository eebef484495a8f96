"""A version's adapter as what changed since its parent: smaller than the file, and exact to the last bit.

The values of a float file, read as unsigned integers, change little from one version to the next: the difference,
modulo 2 to the width, is a small number of either sign. It is folded (0, -1, 1, -2, … become 0, 1, 2, 3, …), so that
its upper bytes are zeros; the bytes are then laid out in planes (all lowest bytes first) and each plane is compressed.
Integers know no rounding and no NaN. A difference takes about an eighth less than an XOR does (benchmarks/README.md).

A delta is ``magic, schema, bytes of an element, two zeros, bytes of the tensors, length of each plane`` (little-endian)
and the planes, a zstandard frame each. It is of use only beside the parent, and proves nothing: whoever rebuilds a
file compares its digest with the one that the manifest has of the whole file.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from spotgrpo.shared.errors import WireError

SCHEMA: Final = 1
MAGIC: Final = b"SGDL"
HEAD: Final = struct.Struct("<4sBB2xQ")
LENGTH: Final = struct.Struct("<Q")
LEVEL: Final = 1
"""Level 3 takes twice as long for 2% less; below 1 the low plane is not compressed at all."""
WORTH: Final = 0.9
"""Of the file, that a delta may be long: what is stored beside the file has to save something."""
MAX_WINDOW: Final = 8 << 20
"""Bytes that a frame may have its reader keep; those of level 1 ask for half a megabyte."""
BLOCK: Final = 1 << 16
"""Values that are worked on at a time, so that what lies between two operations stays in the cache."""
ELEMENT_BYTES: Final = {"F16": 2, "BF16": 2, "F32": 4}
SIGNED: Final[dict[int, npt.DTypeLike]] = {2: "<i2", 4: "<i4"}
UNSIGNED: Final[dict[int, npt.DTypeLike]] = {2: "<u2", 4: "<u4"}

Unsigned = npt.NDArray[np.unsignedinteger[Any]]


def encode_delta(parent: bytes, new: bytes) -> bytes | None:
    """What turns ``parent`` into ``new``, both whole safetensors files.

    None where that is no use: another layout (header) than the parent's, tensors of more than one width or of
    integers, no tensors, or a delta that would hardly be shorter than the file.
    """
    start = _tensors_at(new)
    if start is None or len(parent) != len(new) or parent[:start] != new[:start]:
        return None
    width = _width(new[8:start])
    if width is None or len(new) == start or (len(new) - start) % width:
        return None
    folded = _changes(_values(parent, start, width), _values(new, start, width), width)
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    planes = [compress(plane.data) for plane in folded]
    head = HEAD.pack(MAGIC, SCHEMA, width, len(new) - start)
    delta = b"".join([head, *(LENGTH.pack(len(plane)) for plane in planes), *planes])
    return delta if len(delta) < WORTH * len(new) else None


def apply_delta(parent: bytes, delta: bytes, size: int) -> bytes:
    """The file of ``size`` bytes that :func:`encode_delta` made ``delta`` of, given the same ``parent``.

    Takes memory for three files of ``size`` at most, whatever ``delta`` claims. With another parent, or bytes that
    were changed with care, the result is another file: compare its digest.

    Raises:
        WireError: not a delta, of another schema, cut, damaged, or for a file of another size.
    """
    start = _tensors_at(parent)
    if start is None or size != len(parent):
        raise WireError(f"a delta for a file of {size} bytes does not fit one of {len(parent)}")
    width, planes = _planes(delta, size - start)
    old = _values(parent, start, width)
    folded = [np.frombuffer(_decompress(plane, len(old)), np.uint8) for plane in planes]
    return b"".join([parent[:start], _changed(old, folded, width).data])


def _tensors_at(file: bytes) -> int | None:
    """Where the tensors of a safetensors file begin; None for anything else."""
    start = 8 + int.from_bytes(file[:8], "little")
    return start if 8 < start <= len(file) else None


def _width(header: bytes) -> int | None:
    """Bytes of an element, where all tensors have float elements of one width."""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        widths = {ELEMENT_BYTES.get(tensor["dtype"]) for tensor in tensors.values()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return widths.pop() if len(widths) == 1 else None


def _values(file: bytes, start: int, width: int) -> Unsigned:
    return np.frombuffer(file, UNSIGNED[width], offset=start)


def _changes(old: Unsigned, new: Unsigned, width: int) -> npt.NDArray[np.uint8]:
    """The folded differences as ``width`` rows, lowest bytes first."""
    planes = np.empty((width, len(new)), np.uint8)
    for at in range(0, len(new), BLOCK):
        block = slice(at, at + BLOCK)
        change = new[block] - old[block]
        signs = change.view(SIGNED[width]) >> (8 * width - 1)
        change <<= 1
        change ^= signs.view(UNSIGNED[width])
        planes[:, block] = change.view(np.uint8).reshape(-1, width).T
    return planes


def _changed(old: Unsigned, planes: list[npt.NDArray[np.uint8]], width: int) -> Unsigned:
    """The inverse of :func:`_changes`: the new values."""
    new = np.empty_like(old)
    for at in range(0, len(old), BLOCK):
        block = slice(at, at + BLOCK)
        change = new[block]
        for bytes_of_each, plane in zip(
            change.view(np.uint8).reshape(-1, width).T, planes, strict=True
        ):
            bytes_of_each[:] = plane[block]
        signs = -(change & 1)
        change >>= 1
        change ^= signs
        change += old[block]
    return new


def _planes(delta: bytes, region: int) -> tuple[int, list[memoryview]]:
    """Width and compressed planes of a delta of ``region`` bytes of tensors."""
    if len(delta) < HEAD.size:
        raise WireError(f"a delta of {len(delta)} bytes is cut")
    magic, schema, width, bytes_of_tensors = HEAD.unpack_from(delta)
    if magic != MAGIC or schema != SCHEMA or width not in UNSIGNED:
        raise WireError(
            f"not a delta of schema {SCHEMA}: it begins with {delta[: HEAD.size].hex()}"
        )
    if bytes_of_tensors != region or region % width:
        raise WireError(f"a delta of {bytes_of_tensors} bytes of tensors, where {region} are")
    at = HEAD.size + width * LENGTH.size
    if len(delta) < at:
        raise WireError(f"a delta of {len(delta)} bytes is cut")
    planes = []
    for (length,) in LENGTH.iter_unpack(delta[HEAD.size : at]):
        planes.append(memoryview(delta)[at : at + length])
        at += length
    if at != len(delta):
        raise WireError(f"the planes of a delta of {len(delta)} bytes end at {at}")
    return width, planes


def _decompress(plane: memoryview, size: int) -> bytes:
    """The ``size`` bytes of a plane. What the frame says of itself is checked before room is made for it."""
    try:
        claimed = zstandard.get_frame_parameters(plane)
        if claimed.content_size != size or claimed.window_size > MAX_WINDOW:
            raise WireError(
                f"a plane of {claimed.content_size} bytes that asks for {claimed.window_size} more, "
                f"where one of {size} belongs"
            )
        reader = zstandard.ZstdDecompressor()
        return reader.decompress(plane, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise WireError(f"a plane does not decompress: {exc}") from exc
