"""A task becomes a group: one request a rollout, or one after the other where a long one is split into segments.

Rollouts that a partial brought are carried on from where they stood. Then their tokens are of several versions, as
where a rollout moves to another one between two segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spotgrpo.producer.engines.base import Chunk, Engine, GenerationRequest, RequestRefused
from spotgrpo.producer.room import Seats
from spotgrpo.producer.segments import GroupVersions, is_border, segment_of
from spotgrpo.shared.errors import ConfigError, SpotGRPOError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Finish, PartialRollout, Rollout, Task, VersionRun

TELLING = 2
"""Tokens after the first ones, which may have waited for a prompt to be read, that say how long one takes."""


class Aborted(SpotGRPOError):
    """The engine gave a request up before its end, by itself or because a drain interrupted it."""


@dataclass(eq=False)
class Draft:
    """A rollout in the making. It holds every token that the engine gave, so that a drain can save it at any moment.

    Attributes:
        brought: how many of its tokens a partial brought.
        saved: how many of them this worker has stored.
        began_at, began_tokens: when (monotonic seconds) its first tokens of this worker came, and how many there were.
    """

    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    finish: Finish | None = None
    brought: int = 0
    saved: int = 0
    began_at: float = 0.0
    began_tokens: int = 0

    @property
    def has_grown(self) -> bool:
        """Whether it has tokens that no partial holds."""
        return len(self.token_ids) > max(self.brought, self.saved)

    @classmethod
    def of(cls, partial: PartialRollout) -> Draft:
        """The draft that ``partial`` was made of."""
        return cls(
            seed=partial.seed,
            token_ids=partial.token_ids.tolist(),
            logprobs=partial.logprobs.tolist(),
            versions=list(partial.versions),
            finish=partial.finish,
            brought=len(partial.token_ids),
        )

    def add(self, chunk: Chunk, version: PolicyVersion) -> None:
        """Take in tokens that ``version`` sampled."""
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        tokens = len(chunk.token_ids)
        if self.versions and self.versions[-1].version == version:
            tokens += self.versions.pop().tokens
        if tokens:
            self.versions.append(VersionRun(version, tokens))

    def note_beginning(self) -> None:
        """Tokens came."""
        if not self.began_at:
            self.began_at, self.began_tokens = time.monotonic(), len(self.token_ids)

    def token_s(self, now: float) -> float:
        """Seconds a token since the first here, with half a one that is under way; 0 where it is too early to tell."""
        since = len(self.token_ids) - self.began_tokens
        return (now - self.began_at) / (since + 0.5) if since >= TELLING else 0.0

    def partial(self) -> PartialRollout:
        """As it stands, to be carried on elsewhere."""
        return PartialRollout(
            seed=self.seed,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=tuple(self.versions),
            finish=self.finish,
        )

    def rollout(self, finish: Finish) -> Rollout:
        """The whole completion, not scored yet."""
        return Rollout(
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            loss_mask=np.ones(len(self.token_ids), dtype=np.bool_),
            versions=tuple(self.versions),
            reward=None,
            reward_parts={},
            finish=finish,
        )


@dataclass(frozen=True)
class Sampled:
    """The unscored rollouts of a task, and when (Unix seconds) they were begun here and done."""

    rollouts: tuple[Rollout, ...]
    started_at: float
    generated_at: float


class Sampler:
    """Samples groups on one engine.

    Args:
        on_tokens: called with the number of tokens whenever some arrive.
        segment_tokens: that one request samples at most; None: a rollout is one request.
    """

    def __init__(
        self,
        engine: Engine,
        on_tokens: Callable[[int], None],
        segment_tokens: int | None = None,
    ) -> None:
        self._engine, self._on_tokens = engine, on_tokens
        self._segment_tokens = segment_tokens
        self._numbers = itertools.count()
        self._running: dict[str, asyncio.Task[Any]] = {}
        self.interrupted = False

    async def sample(
        self, task: Task, versions: GroupVersions, drafts: Sequence[Draft], seats: Seats
    ) -> Sampled:
        """Bring all ``drafts`` of ``task`` to their end under ``versions``, each in one of the ``seats`` while it runs.

        Cancelling it aborts its requests.

        Raises:
            Aborted: the engine ended a request early, or :meth:`interrupt` did.
            RequestRefused: the engine cannot do this task, and is well.
        """
        started = time.time()
        try:
            async with asyncio.TaskGroup() as group:
                for draft in drafts:
                    await seats.take()
                    if draft.finish is None and not self.interrupted:
                        group.create_task(self._seated(task, versions, draft, seats))
                    else:
                        seats.give_back()
        except ExceptionGroup as errors:
            # ConfigError: the prompt does not fit, which a request may say by that name too.
            refused, others = errors.split((RequestRefused, ConfigError))
            if refused is None or others is not None:
                raise
            raise RequestRefused(f"{refused.exceptions[0]}") from errors
        rollouts = [draft.rollout(draft.finish) for draft in drafts if draft.finish is not None]
        if len(rollouts) < len(drafts):
            raise Aborted(f"task {task.task_id} was interrupted")
        return Sampled(tuple(rollouts), started, time.time())

    async def interrupt(self, within_s: float) -> None:
        """End every request where it stands, and begin none any more.

        Returns once all tokens that were sampled are in their drafts: a request is left to end by itself with
        ``abort``, since its last tokens may still be on their way. An engine that is stuck gets ``within_s``.
        """
        self.interrupted = True
        for request_id in list(self._running):
            with contextlib.suppress(SpotGRPOError):  # an engine that died samples nothing more
                await self._engine.abort(request_id)
        if self._running:
            await asyncio.wait(self._running.values(), timeout=within_s)

    async def _seated(
        self, task: Task, versions: GroupVersions, draft: Draft, seats: Seats
    ) -> None:
        """A rollout in a place that was taken for it: the next one's as soon as it is over."""
        try:
            await self._carry_on(task, versions, draft)
        finally:
            seats.give_back()

    async def _carry_on(self, task: Task, versions: GroupVersions, draft: Draft) -> None:
        """Segment after segment, to the end of the rollout. Nothing is awaited between two of them."""
        version: PolicyVersion | None = None
        while draft.finish is None and not self.interrupted:
            with versions.segment(version) as version:
                await self._sample_segment(self._request(task, version, draft), task, draft)

    def _request(self, task: Task, version: PolicyVersion, draft: Draft) -> GenerationRequest:
        tokens = len(draft.token_ids)
        return GenerationRequest(
            request_id=f"{task.task_id}.{next(self._numbers)}",
            prompt_ids=task.prompt_ids,
            prefix_ids=tuple(draft.token_ids),
            sampling=segment_of(task.sampling, tokens, self._segment_tokens),
            seed=draft.seed,
            version=version,
        )

    async def _sample_segment(self, request: GenerationRequest, task: Task, draft: Draft) -> None:
        finish: str | None = None
        with self._known(request.request_id):
            try:
                async for chunk in self._engine.submit(request):
                    draft.add(chunk, request.version)
                    draft.note_beginning()
                    finish = chunk.finish
                    self._on_tokens(len(chunk.token_ids))
            except asyncio.CancelledError:
                with contextlib.suppress(SpotGRPOError):
                    await asyncio.shield(self._engine.abort(request.request_id))
                raise
        tokens = len(draft.token_ids)
        if finish in ("stop", "length") and tokens:
            if not is_border(finish, tokens, request.sampling, task.sampling):
                draft.finish = "stop" if finish == "stop" else "length"
        elif not self.interrupted:
            raise Aborted(f"request {request.request_id} ended with {finish} after {tokens} tokens")

    @contextlib.contextmanager
    def _known(self, request_id: str) -> Iterator[None]:
        """Let :meth:`interrupt` find the request, and wait for who reads its tokens."""
        reader = asyncio.current_task()
        if reader is not None:
            self._running[request_id] = reader
        try:
            yield
        finally:
            self._running.pop(request_id, None)
