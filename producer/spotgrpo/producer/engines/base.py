"""What a worker needs of an engine. Groups, partials, switching and draining are built on this once, for all.

An engine runs in the worker's event loop and must not block it: heavy work goes to its own thread. It never
chooses a version: every request names one that was loaded before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Finish, Float32Array, Sampling


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample.

    Attributes:
        request_id: unique in the engine's life.
        prompt_ids: the prompt's tokens.
        prefix_ids: completion tokens already sampled (a partial); they count against ``max_new_tokens`` and are
            not sent again.
        seed: of this rollout; with the prefix's length it fixes the random stream.
        version: a loaded version.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    version: PolicyVersion
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Chunk:
    """Newly sampled tokens with their behaviour logprobs (at the sampling temperature).

    ``finish`` is set on the last chunk: ``stop``, ``length``, or ``abort`` after :meth:`Engine.abort`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | None | str = None


class Engine(Protocol):
    """A language model with LoRA versions, sampled asynchronously."""

    @property
    def name(self) -> str:
        """``vllm``, ``transformers``, …"""

    @property
    def engine_version(self) -> str:
        """Version of the library behind it."""

    async def start(self) -> None:
        """Load the base model. Raises ConfigError for a model that is missing or does not fit."""

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        """Load a PEFT folder under a name and id never used before; running requests go on.

        Returns the number of modules that took the adapter. Raises IntegrityError where the adapter does not fit
        the base (unknown modules, other shapes, rank over the limit). The folder must stay until ``unload``.
        """

    async def unload(self, version: PolicyVersion) -> None:
        """Free a version that nothing in flight names."""

    def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Sample a completion; chunks arrive as they come."""

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields what it has, with ``finish='abort'``. Unknown ids are fine."""

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        """Logprobs at temperature 1 of ``token_ids[1:]`` given what stands before each, float32 [T-1].

        ``version`` None is the base without an adapter.
        """

    async def close(self) -> None:
        """Free the model. Running requests end with ``abort``."""
