"""Rules of the protocol broken on purpose, one at a time: each must be caught by the checks of ``books``.

A mutant is installed in every role process of a run. It changes what the code does, never what the checks look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Mutant:
    """A rule that is broken, and how."""

    what: str
    install: Callable[[], None]


MUTANTS: Mapping[str, Mutant] = MappingProxyType({})
