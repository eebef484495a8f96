"""The engine of the chaos runs: real adapters, really loaded and probed, and tokens that are paced and scripted.

Loading, unloading and scoring are the transformers engine's own, so that digests, module counts and probes mean
what they mean in a run. Tokens are a function of seed, version and position and cost a sleep, not a core: hundreds of
groups pass in a minute, and a killed worker frees no core for the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from spotgrpo.producer.engines.base import Chunk, EngineSpec, GenerationRequest
from spotgrpo.producer.engines.transformers import TransformersEngine
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.manifest import ADAPTER_WEIGHTS, sha256_hex
from spotgrpo.shared.wire import Float32Array
from tests.tools.scripted_engine import ScriptedEngine


class PacedEngine(ScriptedEngine):
    """See the module.

    Args:
        folder: of the world; what was loaded and carried on is written down there.
    """

    name = "paced"

    def __init__(self, spec: EngineSpec, token_s: float, folder: Path) -> None:
        super().__init__(token_s=token_s, max_versions=spec.max_versions + 1)
        self._real = TransformersEngine(spec)
        self._stalled = folder / f"stalled.{os.getpid()}"  # while it is there, no token comes
        self._journal = folder / "continued.jsonl"
        self._loads = folder / "adapters" / f"loaded.{os.getpid()}"

    async def start(self) -> None:
        await self._real.start()

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        await super().load(version, folder)
        digest = sha256_hex((folder / ADAPTER_WEIGHTS).read_bytes())
        with self._loads.open("a") as file:
            file.write(f"{version} {digest}\n")
        try:
            return await self._real.load(version, folder)
        except BaseException:
            await super().unload(version)
            raise

    async def unload(self, version: PolicyVersion) -> None:
        await super().unload(version)
        await self._real.unload(version)

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        return await self._real.score(version, token_ids)

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self._note(request)
        async for chunk in super().submit(request):
            yield chunk

    async def pause(self) -> None:
        await super().pause()
        while self._stalled.exists():
            await super().pause()

    def _note(self, request: GenerationRequest) -> None:
        if request.prefix_ids:
            task = request.request_id.rpartition(".")[0]
            line = {
                "pid": os.getpid(),
                "task": task,
                "seed": request.seed,
                "from": len(request.prefix_ids),
                "version": str(request.version),
            }
            with self._journal.open("a") as file:
                file.write(json.dumps(line) + "\n")

    async def close(self) -> None:
        await super().close()
        await self._real.close()
