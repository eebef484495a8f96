"""An engine on a thread of its own: the half of the protocol that does not depend on what samples.

The event loop gives orders (submit, abort, load, unload, score); the thread takes them between any two
tokens, so a version is adopted while others generate, and nothing but the thread touches the model.
A subclass says how to load, take a request, and sample one token for everything that runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from spotgrpo.producer.engines.base import Chunk
from spotgrpo.shared.errors import SpotGRPOError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from spotgrpo.producer.engines.base import EngineSpec, GenerationRequest
    from spotgrpo.producer.engines.ends import Ends
    from spotgrpo.shared.ids import PolicyVersion
    from spotgrpo.shared.wire import Float32Array

log = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_S: Final = 20.0
"""For the step at hand and for freeing the model. The thread is a daemon: a stuck one does not keep the process."""
LINGER_S: Final = 0.002
"""An idle engine waits so long after the first order, so that a whole group is taken at once."""
FOLLOW_UP_S: Final = 0.005
"""A load is followed by its probe, a probe by requests for what it proved, and a request that is over by the one that
gets its place: a step that began before that order is here would hold it up by a whole token."""


@dataclass(eq=False)
class Running:
    """A completion in the making: ``completion`` holds its prefix as well. ``outbox`` is the event loop's."""

    request: GenerationRequest
    completion: list[int] = field(default_factory=list)
    outbox: asyncio.Queue[Chunk | SpotGRPOError] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        self.completion = list(self.request.prefix_ids)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and prefix: what is computed before the first new token."""
        return (*self.request.prompt_ids, *self.request.prefix_ids)


class ThreadedEngine(ABC):
    """Implements :class:`spotgrpo.producer.engines.base.Engine` but for what the abstract methods do.

    Abstract methods and everything under "on the thread" run on the engine's thread. SpotGRPOError from
    them is the caller's; any other exception ends the engine, and everyone who waits hears of it.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{self.name}-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: SpotGRPOError | None = None
        self._closing = False
        self._followers = 0
        """Orders that what has just been done brings about in the event loop."""
        self._ends: Ends | None = None
        self._running: dict[str, Running] = {}
        self._versions: set[PolicyVersion] = set()

    @property
    @abstractmethod
    def name(self) -> str:
        """What groups carry as their engine."""

    @abstractmethod
    def _open(self) -> Ends:
        """Load the base model, or raise ConfigError."""

    @abstractmethod
    def _put_on(self, version: PolicyVersion, folder: Path) -> int:
        """Load an adapter; modules that took it. IntegrityError must leave nothing behind."""

    @abstractmethod
    def _take_off(self, version: PolicyVersion) -> None:
        """Free an adapter that is loaded and not in use."""

    @abstractmethod
    def _take(self, running: Running) -> None:
        """Begin a checked request."""

    @abstractmethod
    def _drop(self, running: Running) -> None:
        """Forget a request that was taken and is not over."""

    @abstractmethod
    def _sample(self) -> list[tuple[Running, Chunk]]:
        """New tokens of everything that runs; requests whose chunk has a finish are over."""

    @abstractmethod
    def _logprobs(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        """See :meth:`Engine.score`."""

    @abstractmethod
    def _free(self) -> None:
        """Let go of the model. Called once at the end, also after a failed start."""

    # ---- in the event loop -------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the base model. Raises ConfigError for a model that is missing or does not fit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._ends = await self._call(self._open)

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        """Load a PEFT folder between two tokens; see :meth:`Engine.load`."""
        return await self._call(partial(self._load, version, folder))

    async def unload(self, version: PolicyVersion) -> None:
        """Free a version that nothing in flight names; see :meth:`Engine.unload`."""
        await self._call(partial(self._unload, version))

    def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Sample a completion; see :meth:`Engine.submit`."""
        running = Running(request)
        self._orders.put(partial(self._accept, running))
        if self._death is not None:  # nobody may take the order any more
            running.outbox.put_nowait(self._death)
        return self._chunks(running)

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

    async def abort(self, request_id: str) -> None:
        """End a request before its next token. Unknown ids are fine."""
        self._orders.put(partial(self._abort, request_id))

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        """Logprobs at temperature 1 of ``token_ids[1:]``, float32 [T-1]; see :meth:`Engine.score`."""
        return await self._call(partial(self._score, version, tuple(token_ids)))

    async def close(self) -> None:
        """Abort what runs, free the model and end the thread; one that is stuck is left behind. Idempotent."""
        if self._thread.ident is None:
            return
        self._orders.put(self._stop)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            log.warning("the %s engine is stuck: leaving without it", self.name)

    async def _call(self, function: Callable[[], T]) -> T:
        if self._thread.ident is None:
            raise SpotGRPOError(f"the {self.name} engine is not started")
        future: Future[T] = Future()
        self._orders.put(partial(self._answer, future, function))
        if self._death is not None:  # nobody may take the order any more
            raise self._death
        return await asyncio.wrap_future(future)

    # ---- on the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Take orders; sample one token for everything that runs; until closed or broken.

        Waits only while nothing runs; any order wakes it. Ends by telling all who wait.
        """
        try:
            while not self._closing:
                self._take_orders()
                if self._running and not self._closing:
                    self._post_chunks(self._sample())
            self._leave(SpotGRPOError(f"the {self.name} engine is closed"))
        except Exception as exc:  # noqa: BLE001  the thread's edge: whoever waits has to hear of it
            self._leave(self._death_of(exc))

    def _take_orders(self) -> None:
        if not self._running:
            self._orders.get()()
            time.sleep(LINGER_S)
        with contextlib.suppress(queue.Empty):
            while not self._closing:
                waits = self._followers > 0
                self._followers -= waits
                self._orders.get(waits, FOLLOW_UP_S)()
        self._followers = 0

    def _answer(self, future: Future[T], function: Callable[[], T]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._death is not None:
                raise self._death
            future.set_result(function())
        except SpotGRPOError as exc:
            future.set_exception(exc)
        except BaseException as exc:
            future.set_exception(self._death_of(exc))
            raise

    def _death_of(self, exc: BaseException) -> SpotGRPOError:
        death = SpotGRPOError(f"the {self.name} engine died: {type(exc).__name__}: {exc}")
        death.__cause__ = exc
        return death

    def _leave(self, reason: SpotGRPOError) -> None:
        """Tell all who wait. Orders in the queue are told here; later ones see ``_death``."""
        self._death = reason
        last = Chunk((), (), "abort") if self._closing else reason
        self._post([(running, last) for running in self._running.values()])
        self._running.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        self._free()

    def _stop(self) -> None:
        self._closing = True

    def _load(self, version: PolicyVersion, folder: Path) -> int:
        if version in self._versions:
            raise SpotGRPOError(f"version {version} is loaded already")
        if len(self._versions) > self._spec.max_versions:
            raise SpotGRPOError(f"{len(self._versions)} versions are loaded; unload one first")
        taken = self._put_on(version, folder)
        self._versions.add(version)
        self._followers += 1
        return taken

    def _unload(self, version: PolicyVersion) -> None:
        users = sum(running.request.version == version for running in self._running.values())
        if users:
            raise SpotGRPOError(f"version {version} cannot go: {users} requests run on it")
        if version in self._versions:
            self._versions.discard(version)
            self._take_off(version)

    def _score(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        if version is not None:
            self._check_loaded(version)
        if self._ends is not None:
            self._ends.check_ids(token_ids)
        self._followers += 1
        return self._logprobs(version, token_ids)

    def _check_loaded(self, version: PolicyVersion) -> None:
        if version not in self._versions:
            raise SpotGRPOError(f"version {version} is not loaded")

    def _accept(self, running: Running) -> None:
        try:
            finish = self._checked(running)
        except SpotGRPOError as exc:
            self._post([(running, exc)])
            return
        if finish is not None:
            self._post([(running, Chunk((), (), finish))])
            return
        self._running[running.request.request_id] = running
        self._take(running)

    def _checked(self, running: Running) -> str | None:
        """Why a request's prefix is a whole completion already, or None."""
        request = running.request
        if self._death is not None or self._ends is None:
            raise self._death or SpotGRPOError(f"the {self.name} engine is not started")
        self._check_loaded(request.version)
        if request.request_id in self._running:
            raise SpotGRPOError(f"request {request.request_id} is running already")
        self._ends.token_limit(request)
        finish = self._ends.finish(request, running.completion)
        if finish is None:
            self._ends.check_ids(running.sequence)
        return finish

    def _abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            self._drop(running)
            self._post([(running, Chunk((), (), "abort"))])

    def _post_chunks(self, news: list[tuple[Running, Chunk]]) -> None:
        for running, chunk in news:
            if chunk.finish is not None:
                del self._running[running.request.request_id]
                self._followers += 1
        self._post(news)

    def _post(self, news: Sequence[tuple[Running, Chunk | SpotGRPOError]]) -> None:
        if news and self._loop is not None:
            # A loop that is closed has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_deliver, news)


def _deliver(news: Sequence[tuple[Running, Chunk | SpotGRPOError]]) -> None:
    for running, item in news:
        running.outbox.put_nowait(item)
