"""A deterministic engine without a model: every token is a function of seed, version and position.

For loop and chaos tests, where hundreds of groups must pass in seconds. It keeps the whole protocol of
``engines.base``: streamed chunks, abort, prefixes, versions that must be loaded, and it counts misuse.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from spotgrpo.producer.engines.base import Chunk, GenerationRequest
from spotgrpo.shared.errors import IntegrityError, SpotGRPOError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Float32Array

VOCABULARY = 100


class ScriptedEngine:
    """See the module.

    Args:
        token_s: seconds a token takes.
        modules: what ``load`` says took the adapter.
        max_versions: more than so many loaded at a time is an error.
    """

    name = "scripted"
    engine_version = "1"

    def __init__(self, token_s: float = 0.0, modules: int = 1, max_versions: int = 4) -> None:
        self.token_s = token_s
        self.modules = modules
        self.max_versions = max_versions
        self.loaded: dict[PolicyVersion, Path] = {}
        self.served: list[PolicyVersion] = []
        self.logprob_shift: dict[PolicyVersion, float] = {}
        self.dead = False
        self._aborted: set[str] = set()

    async def start(self) -> None:
        return None

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        if version in self.loaded or len(self.loaded) >= self.max_versions:
            raise IntegrityError(f"cannot load {version} beside {sorted(map(str, self.loaded))}")
        if not (folder / "adapter_model.safetensors").is_file():
            raise IntegrityError(f"{folder} holds no adapter")
        self.loaded[version] = folder
        return self.modules

    async def unload(self, version: PolicyVersion) -> None:
        self.loaded.pop(version, None)

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        if request.version not in self.loaded:
            raise SpotGRPOError(f"{request.version} is not loaded")
        self.served.append(request.version)
        first = len(request.prefix_ids)
        for position in range(first, request.sampling.max_new_tokens):
            await self.pause()
            if self.dead:
                raise SpotGRPOError("the engine died")
            if request.request_id in self._aborted:
                yield Chunk((), (), finish="abort")
                return
            if request.version not in self.loaded:
                raise SpotGRPOError(f"{request.version} was unloaded under a running request")
            last = position == request.sampling.max_new_tokens - 1
            token, logprob = scripted_token(request.seed, request.version, position)
            yield Chunk((token,), (logprob,), finish="length" if last else None)

    async def pause(self) -> None:
        """What a token takes."""
        await asyncio.sleep(self.token_s)

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        shift = self.logprob_shift.get(version, 0.0) if version else 0.0
        return np.full(len(token_ids) - 1, -1.0 + shift, dtype=np.float32)

    async def close(self) -> None:
        self.loaded.clear()


def scripted_token(seed: int, version: PolicyVersion, position: int) -> tuple[int, float]:
    """The token and logprob that the engine samples there."""
    digest = hashlib.sha256(f"{seed}:{version}:{position}".encode()).digest()
    return 1 + digest[0] % (VOCABULARY - 1), -float(digest[1] + 1) / 64.0
