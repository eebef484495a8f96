"""Adapter files of any values, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1}


def safetensors_of(tensors: Mapping[str, tuple[str, bytes]]) -> bytes:
    """A safetensors file of flat tensors: name to dtype (as the format spells it) and bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, body) in tensors.items():
        end = at + len(body)
        shape = [len(body) // BYTES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(body for _, body in tensors.values())
