"""Every option of the configuration by its dotted name, read off the pydantic models.

``rewards`` is a list of tables; its options are named with a star (``rewards.*.function``).
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from spotgrpo.shared.config import Config


@dataclass(frozen=True)
class Option:
    """One setting.

    Attributes:
        key: dotted name, list indexes as ``*``.
        annotation: the field's type.
        meaning: its description.
        default: the default value, or None where ``required``.
        parent: name of the table it stands in.
    """

    key: str
    annotation: Any
    meaning: str
    default: object
    required: bool

    @property
    def parent(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def is_secret(self) -> bool:
        """True where the value must never be shown."""
        return SecretStr in _members(self.annotation)

    @property
    def is_text(self) -> bool:
        """True where only text is a right value, so that ``--set run.id=007`` means the text."""
        members = [member for member in _members(self.annotation) if member is not type(None)]
        return bool(members) and all(_is_text(member) for member in members)

    @property
    def is_free(self) -> bool:
        """True for tables whose keys are somebody else's (``worker.vllm``)."""
        return any(typing.get_origin(member) is dict for member in _members(self.annotation))

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that a Literal allows."""
        found: list[str] = []
        for member in _members(self.annotation):
            if typing.get_origin(member) is Literal:
                found += [str(value) for value in typing.get_args(member)]
        return tuple(found)


@cache
def options(kind: type[BaseModel] = Config) -> dict[str, Option]:
    """Every option of ``kind`` by its dotted name, in the order of the models."""
    return {option.key: option for option in _walk(kind, "")}


@cache
def tables(kind: type[BaseModel] = Config) -> frozenset[str]:
    """Dotted names of the tables (``train``) and lists of tables (``rewards``, ``rewards.*``)."""
    found: set[str] = set()
    for key in options(kind):
        parts = key.split(".")[:-1]
        found |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    return frozenset(found)


def _walk(kind: type[BaseModel], prefix: str) -> list[Option]:
    found: list[Option] = []
    for name, field in kind.model_fields.items():
        section, is_list = _section_of(field)
        if section is not None:
            found += _walk(section, f"{prefix}{name}." + ("*." if is_list else ""))
            continue
        required = field.is_required()
        default = None if required else field.get_default(call_default_factory=True)
        found.append(
            Option(prefix + name, field.annotation, field.description or "", default, required)
        )
    return found


def _section_of(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    for member in _members(field.annotation):
        inner = typing.get_args(member)[0] if typing.get_origin(member) is list else member
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner, inner is not member
    return None, False


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types that a union allows, ``Annotated`` stripped; of any other type just it."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(m for part in typing.get_args(annotation) for m in _members(part))
    return (annotation,)


def _is_text(member: Any) -> bool:
    return member in (str, SecretStr, Path) or (
        typing.get_origin(member) is Literal
        and all(isinstance(value, str) for value in typing.get_args(member))
    )


def option_table() -> str:
    """Markdown table of every option: name, default, meaning."""
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for option in options().values():
        choices = (
            f" One of {', '.join(f'`{c}`' for c in option.choices)}." if option.choices else ""
        )
        meaning = (option.meaning + choices).replace("|", "\\|")
        lines.append(f"| `{option.key}` | {_shown_default(option)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _shown_default(option: Option) -> str:
    if option.required:
        return "**required**"
    if option.default is None:
        return "none"
    default = list(option.default) if isinstance(option.default, tuple) else option.default
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default if isinstance(default, str | Path) else json.dumps(default)}`"
