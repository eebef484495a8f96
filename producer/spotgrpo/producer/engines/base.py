"""What a worker needs of an engine. Groups, partials, switching and draining are built on this once, for all.

An engine runs in the worker's event loop and must not block it: heavy work goes to its own thread. It
never chooses a version: every request names one that was loaded before. An engine that dies raises
SpotGRPOError from every iterator and call from then on: the worker process has to end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spotgrpo.shared.errors import SpotGRPOError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

    from spotgrpo.shared.config import WorkerConfig
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.manifest import Probe
    from spotgrpo.shared.wire import Finish, Float32Array, Sampling


class RequestRefused(SpotGRPOError):
    """The engine cannot do this one request, nor could another engine of the run; it is well and goes on."""


@dataclass(frozen=True)
class ServersSpec:
    """The vLLM servers of engine ``vllm-server``.

    Attributes:
        timeout_s: a server without an answer or a token for this long is lost.
        shared_dir: the worker's folder for versions, which the servers see too; None: wherever they are.
        server_dir: ``shared_dir`` as the servers see it; None: by the same path.
    """

    urls: tuple[str, ...]
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 120.0
    shared_dir: Path | None = None
    server_dir: str | None = None

    @classmethod
    def of(cls, worker: WorkerConfig) -> ServersSpec:
        """What a worker's table says of them."""
        key = worker.server_api_key
        return cls(
            urls=tuple(worker.servers),
            api_key=key.get_secret_value() if key else None,
            timeout_s=worker.server_timeout_s,
            shared_dir=worker.cache_dir,
            server_dir=worker.server_adapter_dir,
        )


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is made of. The same spec makes any of them.

    Attributes:
        model: hub name or folder of the base model.
        lora_rank: highest rank of an adapter.
        lora_alpha: scale of the run's adapters; each version's own ``adapter_config.json`` decides.
        target_modules: suffixes of the names of modules that may carry an adapter.
        dtype: of the base model: float32, bfloat16 or float16.
        max_context: longest prompt plus completion in tokens; None: what the model's config says.
        max_versions: versions loaded at a time (``max_staleness + 2``, and the one that is evaluated).
        max_inflight: sequences that are sampled at a time.
        device: auto, cpu, cuda or cuda:N; vLLM takes the platform that it is built for.
        threads: CPU threads; None: the library's choice.
        vllm: further vLLM engine arguments; they win over everything that is derived from this spec.
        servers: where engine ``vllm-server`` samples.
    """

    model: str
    lora_rank: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    max_context: int | None = None
    max_versions: int = 4
    max_inflight: int = 64
    device: str = "auto"
    threads: int | None = None
    vllm: Mapping[str, Any] = field(default_factory=dict)
    servers: ServersSpec | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One completion to sample.

    Attributes:
        request_id: unique in the engine's life.
        prompt_ids: the prompt's tokens.
        prefix_ids: completion tokens already sampled (a partial); they count against
            ``max_new_tokens`` and are not sent again.
        seed: of this rollout; with the prefix's length it fixes the random stream.
        version: a loaded version.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    version: PolicyVersion
    prefix_ids: tuple[int, ...] = ()

    @property
    def stream_seed(self) -> int:
        """For a library that takes a seed a request: a partial must not draw its first numbers again."""
        if not self.prefix_ids:
            return self.seed
        text = f"{self.seed}:{len(self.prefix_ids)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Chunk:
    """Newly sampled tokens with their behaviour logprobs (at the sampling temperature).

    ``finish`` is set on the last chunk: ``stop``, ``length``, or ``abort`` after :meth:`Engine.abort`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish | str | None = None


class Engine(Protocol):
    """A language model with LoRA versions, sampled asynchronously."""

    @property
    def name(self) -> str:
        """What groups carry as their engine: ``vllm``, ``vllm-server`` or ``transformers``."""

    @property
    def engine_version(self) -> str:
        """Version of the library behind it."""

    async def start(self) -> None:
        """Load the base model. Raises ConfigError for a model that is missing or does not fit."""

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        """Load a PEFT folder under a name and id never used before; running requests go on.

        Returns the number of modules that took the adapter. Raises IntegrityError where the adapter
        does not fit the base (unknown modules, other shapes, rank over the limit), and leaves nothing
        of it behind. The folder must stay until ``unload``. One version over ``max_versions`` fits, so
        that the new one can be loaded before the oldest goes.
        """

    async def unload(self, version: PolicyVersion) -> None:
        """Free a version that nothing in flight names. Unknown versions are fine."""

    def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Sample a completion; chunks arrive as they come.

        Called in the event loop that ``start`` ran in. The request runs from this call on, not from the
        first ``anext``. The iterator raises ConfigError for a prompt that leaves no room in the context,
        RequestRefused for tokens that the model does not have, and SpotGRPOError for a version that is not
        loaded or an engine that died. Leaving the iterator early (``aclose``) aborts the request.
        """

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator yields what it has, with ``finish='abort'``. Unknown ids are fine."""

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        """Logprobs at temperature 1 of ``token_ids[1:]`` given what is before each, float32 [T-1].

        ``version`` None is the base without an adapter.
        """

    async def close(self) -> None:
        """Free the model. Running requests end with ``abort``."""


@runtime_checkable
class SeveralServers(Protocol):
    """An engine whose parts answer for each other: one may be wrong while the others are well."""

    async def score_probe(self, version: PolicyVersion, probe: Probe) -> Float32Array:
        """``score`` of the probe's tokens, by a part that fits it; where none does, as any gives them.

        Parts that do not fit while one does take no requests until they do.
        """
