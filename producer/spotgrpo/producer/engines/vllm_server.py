"""vLLM servers as an engine: any ``vllm serve`` over its HTTP API, several of them behind one worker.

A request goes to the least busy server that has its version. Where that server is lost in the middle of it, the next
one goes on after the last token that came, so that a server's death costs time and nothing else. While all are away,
requests wait; ``worker.engine_stall_s`` bounds for how long.

Ends of completions are ours, as with the other engines; stop strings are sent along so that the server ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from spotgrpo.producer.engines.adapter import Linear, read_adapter
from spotgrpo.producer.engines.base import Chunk, RequestRefused
from spotgrpo.producer.engines.base_model import (
    check_targets,
    describe,
    linear_modules,
    refuse_head,
    skeleton,
)
from spotgrpo.producer.engines.server_api import ServerApi, ServerLost
from spotgrpo.producer.engines.server_check import Demands
from spotgrpo.producer.engines.server_pool import ServerPool
from spotgrpo.producer.engines.threaded import Running
from spotgrpo.shared.errors import ConfigError, SpotGRPOError
from spotgrpo.shared.servable import vllm_rank

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from spotgrpo.producer.engines.base import EngineSpec, GenerationRequest, ServersSpec
    from spotgrpo.producer.engines.base_model import BaseModel
    from spotgrpo.producer.engines.ends import Ends
    from spotgrpo.producer.engines.server_api import Part
    from spotgrpo.producer.engines.server_pool import Server
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.manifest import Probe
    from spotgrpo.shared.wire import Float32Array

STREAM_INTERVAL: Final = 8
"""Tokens of an event, but for the first: at one each, reading events would be the worker's main work. Servers
that do not know the setting send each alone."""
MOST_BROKEN_OFF: Final = 3
"""Servers in a row that may die of one request before it is taken for the cause."""
SETTLE_S: Final = 0.5
"""For a server to notice that a request was left, before the folder of its version may go: vLLM reads an adapter
again where it was evicted, and does not survive finding it gone."""


class VLLMServerEngine:
    """Implements Engine and SeveralServers of ``engines.base``. Everything here runs in the event loop.

    Raises ConfigError on creation where ``spec`` has no servers.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if spec.servers is None or not spec.servers.urls:
            raise ConfigError("worker.servers", [], "give the address of at least one vLLM server")
        self._spec, self._servers = spec, spec.servers
        self._pool: ServerPool | None = None
        self._ends: Ends | None = None
        self._modules: dict[str, Linear] = {}
        self._engine_version = ""
        self._versions: set[PolicyVersion] = set()
        self._loading: set[PolicyVersion] = set()
        self._running: dict[str, tuple[Running, asyncio.Task[None]]] = {}
        self._left_at: dict[PolicyVersion, float] = {}
        self._death: SpotGRPOError | None = None

    @property
    def name(self) -> str:
        """``vllm-server``."""
        return "vllm-server"

    @property
    def engine_version(self) -> str:
        """Version of vLLM on the servers that were there at the start."""
        return self._engine_version

    async def start(self) -> None:
        """Wait for a server; see :meth:`Engine.start`.

        Raises:
            ConfigError: the model does not fit, or a server that is there cannot serve the run.
            TransientError: no server answers in time.
        """
        base = await asyncio.to_thread(self._describe)
        self._pool = _open_pool(self._spec, self._servers, base, self._die)
        await self._pool.open()
        self._engine_version = await self._pool.versions()
        self._ends = base.ends

    def _describe(self) -> BaseModel:
        base = describe(self._spec)
        vllm_rank(self._spec.lora_rank)
        model = skeleton(self._spec, base.config)
        refuse_head(self._spec, model)
        self._modules = linear_modules(model)
        check_targets(self._spec, self._modules)
        return base

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        """Load a PEFT folder on every server that is there; see :meth:`Engine.load`.

        The API does not say how many modules took it. Returned is how many the adapter has, after each was held
        against the base model; that the servers apply them is for ``score`` to prove.

        Raises:
            ConfigError: a server cannot read the folder, or was started for smaller adapters.
            IntegrityError: the adapter does not fit the base.
            TransientError: no server is there now.
        """
        pool = self._alive()
        if version in self._versions or version in self._loading:
            raise SpotGRPOError(f"version {version} is loaded already")
        if len(self._versions) > self._spec.max_versions:
            raise SpotGRPOError(f"{len(self._versions)} versions are loaded; unload one first")
        adapter = await asyncio.to_thread(read_adapter, folder)
        adapter.check(self._modules, self._spec.lora_rank, self._spec.target_modules)
        self._loading.add(version)
        try:
            await pool.load(version, path_on_server(self._servers, folder))
            self._versions.add(version)
        finally:
            self._loading.discard(version)
        return len(adapter.shapes)

    async def unload(self, version: PolicyVersion) -> None:
        """Free a version that nothing in flight names; see :meth:`Engine.unload`."""
        pool = self._alive()
        users = sum(running.request.version == version for running, _ in self._running.values())
        if users:
            raise SpotGRPOError(f"version {version} cannot go: {users} requests run on it")
        if version in self._versions:
            self._versions.discard(version)
            await self._settled(self._left_at.pop(version, 0.0))
            await pool.unload(version)

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        """Logprobs at temperature 1 that all servers agree on; see :meth:`Engine.score`.

        Raises:
            IntegrityError: they do not agree.
            TransientError: no server is there now.
        """
        pool = self._alive()
        if version is not None:
            self._check_loaded(version)
        if self._ends is not None:
            self._ends.check_ids(token_ids)
        return await pool.score(version, tuple(token_ids))

    async def score_probe(self, version: PolicyVersion, probe: Probe) -> Float32Array:
        """Logprobs of a probe's tokens; a server that is wrong while another is right is away from now on.

        Raises:
            TransientError: no server is there now.
        """
        pool = self._alive()
        self._check_loaded(version)
        if self._ends is not None:
            self._ends.check_ids(probe.token_ids)
        return await pool.score_probe(version, probe)

    async def close(self) -> None:
        """Abort what runs and leave the servers. Idempotent."""
        self._death = self._death or SpotGRPOError("the vllm-server engine is closed")
        for request_id in list(self._running):
            await self.abort(request_id)
        pool, self._pool = self._pool, None
        if pool is not None:
            await self._settled(max(self._left_at.values(), default=0.0))
            await pool.close()

    # ---- requests --------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Sample a completion; see :meth:`Engine.submit`."""
        running = Running(request)
        try:
            finish = self._checked(running)
        except SpotGRPOError as exc:
            running.outbox.put_nowait(exc)
        else:
            if finish is not None:
                running.outbox.put_nowait(Chunk((), (), finish))
            else:
                task = asyncio.create_task(self._complete(running))
                self._running[request.request_id] = running, task
                task.add_done_callback(partial(self._over, running))
        return self._chunks(running)

    async def abort(self, request_id: str) -> None:
        """End a request with what it has. Unknown ids are fine."""
        running, task = self._running.get(request_id, (None, None))
        if running is not None and task is not None:
            task.cancel()
            self._leave(running)
            self._post(running, Chunk((), (), "abort"))

    async def _chunks(self, running: Running) -> AsyncIterator[Chunk]:
        finished = False
        try:
            while not finished:
                item = await running.outbox.get()
                finished = isinstance(item, SpotGRPOError) or item.finish is not None
                if isinstance(item, SpotGRPOError):
                    raise item
                yield item
        finally:
            if not finished:
                await self.abort(running.request.request_id)

    def _checked(self, running: Running) -> str | None:
        """Why a request is over before its first token; None where it has to run."""
        request, ends = running.request, self._ends
        self._alive()
        self._check_loaded(request.version)
        if request.request_id in self._running:
            raise SpotGRPOError(f"request {request.request_id} is running already")
        if ends is None:
            raise SpotGRPOError("the vllm-server engine is not started")
        ends.token_limit(request)
        finish = ends.finish(request, running.completion)
        if finish is None:
            ends.check_ids(running.sequence)
        return finish

    async def _complete(self, running: Running) -> None:
        """One completion, on as many servers as it takes: each goes on after the last token of the one before."""
        pool, version, broken_off = self._alive(), running.request.version, 0
        is_over = False
        while not is_over:
            had = len(running.completion)
            try:
                async with pool.place(version) as (server, name):
                    is_over = await self._sample(running, server, name)
                if len(running.completion) == had and not is_over:
                    raise SpotGRPOError(f"{server.api.url} ended a request without a token")
            except ServerLost as exc:
                self._leave(running)
                got_some = len(running.completion) > had
                broken_off = 0 if got_some else broken_off + exc.broke_off
                if broken_off >= MOST_BROKEN_OFF:
                    raise RequestRefused(
                        f"{broken_off} servers in a row were lost with it: {exc}"
                    ) from exc

    async def _sample(self, running: Running, server: Server, name: str) -> bool:
        """Take tokens from one server until it ends; whether the completion ended too."""
        async with contextlib.aclosing(server.api.stream(self._body(running, name))) as parts:
            async for part in parts:
                server.hear()
                chunk = self._chunk(running, part)
                if chunk.finish and not part.finish:
                    self._leave(running)
                self._post(running, chunk)
                if chunk.finish or part.finish:
                    return chunk.finish is not None
        return False

    def _body(self, running: Running, name: str) -> dict[str, Any]:
        request = replace(running.request, prefix_ids=tuple(running.completion))
        ends = self._ends
        if ends is None:
            raise SpotGRPOError("the vllm-server engine is not started")
        return {
            "model": name,
            "prompt": [*request.prompt_ids, *request.prefix_ids],
            "max_tokens": ends.token_limit(request) - len(request.prefix_ids),
            "temperature": request.sampling.temperature,
            "seed": request.stream_seed,
            "stop": list(request.sampling.stop),
            "stop_token_ids": sorted(ends.stop_ids(request)),
            "include_stop_str_in_output": True,
            "stream_interval": STREAM_INTERVAL,
        }

    def _chunk(self, running: Running, part: Part) -> Chunk:
        """The new tokens up to where the completion ends; the server may have gone further.

        A server that says ``length`` too early has a limit of its own: then the completion goes on.
        """
        finish: str | None = None
        count = 0
        for token_id in part.token_ids:
            running.completion.append(token_id)
            count += 1
            finish = self._ends.finish(running.request, running.completion) if self._ends else None
            if finish is not None:
                break
        if part.finish == "stop":
            finish = finish or "stop"
        return Chunk(part.token_ids[:count], part.logprobs[:count], finish)

    def _post(self, running: Running, chunk: Chunk) -> None:
        """With its last chunk a request is over: its version may go."""
        if chunk.finish is not None:
            self._running.pop(running.request.request_id, None)
        if chunk.token_ids or chunk.finish:
            running.outbox.put_nowait(chunk)

    def _leave(self, running: Running) -> None:
        """A server may still be busy with a request that nobody waits for."""
        self._left_at[running.request.version] = time.monotonic()

    # ---- ends ------------------------------------------------------------------------------------------

    def _over(self, running: Running, task: asyncio.Task[None]) -> None:
        """A request's task is done: whoever waits hears of an error."""
        entry = self._running.get(running.request.request_id)
        if entry is not None and entry[0] is running:
            del self._running[running.request.request_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            running.outbox.put_nowait(_told(error))

    def _die(self, error: BaseException) -> None:
        """Tell all who wait."""
        self._death = _told(error)
        for running, task in self._running.values():
            task.cancel()
            running.outbox.put_nowait(self._death)
        self._running.clear()

    def _alive(self) -> ServerPool:
        if self._death is not None:
            raise self._death
        if self._pool is None:
            raise SpotGRPOError("the vllm-server engine is not started")
        return self._pool

    def _check_loaded(self, version: PolicyVersion) -> None:
        if version not in self._versions:
            raise SpotGRPOError(f"version {version} is not loaded")

    async def _settled(self, left_at: float) -> None:
        await asyncio.sleep(max(0.0, left_at + SETTLE_S - time.monotonic()))


def path_on_server(servers: ServersSpec, folder: Path) -> str:
    """``folder`` as the servers see it."""
    own = folder.absolute()
    if servers.shared_dir is None or servers.server_dir is None:
        return str(own)
    if not own.is_relative_to(servers.shared_dir.absolute()):
        raise ConfigError("worker.cache_dir", str(servers.shared_dir), f"{own} is not in it")
    inside = own.relative_to(servers.shared_dir.absolute())
    return str(PurePosixPath(servers.server_dir) / inside.as_posix())


def _open_pool(
    spec: EngineSpec, servers: ServersSpec, base: BaseModel, on_failure: Any
) -> ServerPool:
    demands = Demands(
        model=spec.model,
        max_context=base.max_context,
        vocabulary=base.config.get_text_config().vocab_size,
        lora_rank=spec.lora_rank,
        versions=spec.max_versions + 1,
    )
    return ServerPool(
        [ServerApi(url, servers.api_key, servers.timeout_s) for url in servers.urls],
        demands,
        dtype=spec.dtype,
        timeout_s=servers.timeout_s,
        on_failure=on_failure,
    )


def _told(error: BaseException) -> SpotGRPOError:
    if isinstance(error, SpotGRPOError):
        return error
    death = SpotGRPOError(f"the vllm-server engine failed: {type(error).__name__}: {error}")
    death.__cause__ = error
    return death
