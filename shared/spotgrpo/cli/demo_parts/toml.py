"""Writing a configuration as TOML: what Python can read (tomllib) and not write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def to_toml(tables: Mapping[str, object]) -> str:
    """``tables`` as TOML: tables and lists of tables at the top, scalars, lists and inline tables in them.

    Raises:
        TypeError: a value that TOML has not.
    """
    parts = []
    for name, value in tables.items():
        if isinstance(value, Mapping):
            parts.append(f"[{_key(name)}]\n{_lines(value)}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            parts.extend(f"[[{_key(name)}]]\n{_lines(_table(item))}" for item in value)
        else:
            raise TypeError(f"{name} is a {type(value).__name__}, not a table")
    return "\n".join(parts)


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a list of tables holds a {type(value).__name__}")
    return value


def _lines(table: Mapping[str, object]) -> str:
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in table.items())


def _key(name: str) -> str:
    is_bare = name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
    return name if is_bare else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, but for the delete character, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"TOML has no {type(value).__name__}")
