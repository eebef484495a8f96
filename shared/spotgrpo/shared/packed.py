"""The shape of a msgpack body, checked before anything is allocated for what it claims to hold.

``unpackb`` makes room for a list of the declared length before it has seen one element, and how far it lets that go
differs between its versions (with 1.2.4 a kilobyte of headers took 15 MiB). This walk reads headers only and allocates
nothing, so that what is unpacked afterwards has no more elements than the body has bytes, and no more than the limits.

Source of the format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NoReturn

from spotgrpo.shared.errors import WireError

DEEPEST: Final = 32


@dataclass(frozen=True)
class Limits:
    """How much a body may hold: values in all, and lists and maps among them (72 bytes each when empty)."""

    items: int
    containers: int


SCALAR, SIZED, LIST, MAP, REFUSED = range(5)


def _head(first: int) -> tuple[int, int, int]:
    """What the first byte of a value says: its kind, bytes of length field, and the length where that is 0.

    A length counts the bytes that follow (SCALAR, SIZED), elements (LIST) or pairs (MAP).
    """
    if first <= 0x7F or first >= 0xE0:
        return SCALAR, 0, 0
    if first <= 0x8F:
        return MAP, 0, first & 0x0F
    if first <= 0x9F:
        return LIST, 0, first & 0x0F
    if first <= 0xBF:
        return SIZED, 0, first & 0x1F
    return _LATER_HEADS.get(first, (REFUSED, 0, 0))


_LATER_HEADS: Final = {
    0xC0: (SCALAR, 0, 0),
    0xC2: (SCALAR, 0, 0),
    0xC3: (SCALAR, 0, 0),  # nil, false, true
    0xC4: (SIZED, 1, 0),
    0xC5: (SIZED, 2, 0),
    0xC6: (SIZED, 4, 0),  # bin
    0xCA: (SCALAR, 0, 4),
    0xCB: (SCALAR, 0, 8),  # float
    **{0xCC + power: (SCALAR, 0, 1 << power) for power in range(4)},  # uint
    **{0xD0 + power: (SCALAR, 0, 1 << power) for power in range(4)},  # int
    0xD9: (SIZED, 1, 0),
    0xDA: (SIZED, 2, 0),
    0xDB: (SIZED, 4, 0),  # str
    0xDC: (LIST, 2, 0),
    0xDD: (LIST, 4, 0),
    0xDE: (MAP, 2, 0),
    0xDF: (MAP, 4, 0),
}
HEADS: Final = tuple(_head(first) for first in range(256))


def check_shape(body: bytes, limits: Limits) -> None:
    """Return if ``body`` is one whole msgpack value within ``limits`` and without extension types.

    Raises:
        WireError: it is cut, has bytes behind its end, or holds too much.
    """
    end, at = len(body), 0
    items, containers = limits.items, limits.containers
    waiting = [1]  # values still to come, at each level
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        waiting[-1] -= 1
        items -= 1
        if at >= end or items < 0:
            _refuse_more(at < end, limits)
        kind, field, length = HEADS[body[at]]
        at += 1
        if field:
            length = int.from_bytes(body[at : at + field], "big")
            at += field
        if kind <= SIZED:
            at += length
            continue
        children = _children(kind, length, end - at)
        containers -= 1
        waiting.append(children)
        if containers < 0 or len(waiting) > DEEPEST:
            raise WireError(
                f"more than {limits.containers} lists and maps, or deeper than {DEEPEST}, in one body"
            )
    if at != end:
        raise WireError(f"the body is {end} bytes long, its msgpack value {at}")


def _children(kind: int, length: int, left: int) -> int:
    """Values in a list or map; at least a byte each has to follow."""
    if kind == REFUSED:
        raise WireError("a msgpack extension type, or a byte that msgpack does not use")
    children = length if kind == LIST else 2 * length
    if children > left:
        raise WireError(
            f"a list or map of {length} claims more than the {left} bytes that are left"
        )
    return children


def _refuse_more(is_long: bool, limits: Limits) -> NoReturn:
    if is_long:
        raise WireError(f"more than {limits.items} values in one body")
    raise WireError("the body is cut")
