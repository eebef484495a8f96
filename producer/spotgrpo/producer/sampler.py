"""A task becomes a group: one request a rollout, all on the version that was adopted when the task began."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from spotgrpo.producer.engines.base import Engine, GenerationRequest, RequestRefused
from spotgrpo.shared.errors import ConfigError, SpotGRPOError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Finish, Rollout, Task, VersionRun


class Aborted(SpotGRPOError):
    """The engine gave a request up before its end; the task goes back to the queue."""


@dataclass(frozen=True)
class Sampled:
    """The unscored rollouts of a task, and when (Unix seconds) they were begun and done."""

    rollouts: tuple[Rollout, ...]
    started_at: float
    generated_at: float


class Sampler:
    """Samples groups on one engine.

    Args:
        on_tokens: called with the number of tokens whenever some arrive.
    """

    def __init__(self, engine: Engine, on_tokens: Callable[[int], None]) -> None:
        self._engine, self._on_tokens = engine, on_tokens
        self._numbers = itertools.count()

    async def sample(self, task: Task, version: PolicyVersion) -> Sampled:
        """All rollouts of ``task`` under ``version``. Cancelling it aborts its requests.

        Raises:
            Aborted: the engine ended a request early.
            RequestRefused: the engine cannot do this task, and is well.
        """
        started = time.time()
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._rollout(task, version, seed)) for seed in task.seeds
                ]
        except ExceptionGroup as errors:
            # ConfigError: the prompt does not fit, which a request may say by that name too.
            refused, others = errors.split((RequestRefused, ConfigError))
            if refused is None or others is not None:
                raise
            raise RequestRefused(f"{refused.exceptions[0]}") from errors
        return Sampled(tuple(one.result() for one in running), started, time.time())

    async def _rollout(self, task: Task, version: PolicyVersion, seed: int) -> Rollout:
        request = GenerationRequest(
            request_id=f"{task.task_id}.{next(self._numbers)}",
            prompt_ids=task.prompt_ids,
            sampling=task.sampling,
            seed=seed,
            version=version,
        )
        token_ids: list[int] = []
        logprobs: list[float] = []
        finish: str | None = None
        try:
            async for chunk in self._engine.submit(request):
                token_ids += chunk.token_ids
                logprobs += chunk.logprobs
                finish = chunk.finish
                self._on_tokens(len(chunk.token_ids))
        except asyncio.CancelledError:
            with contextlib.suppress(SpotGRPOError):
                await asyncio.shield(self._engine.abort(request.request_id))
            raise
        if finish not in ("stop", "length") or not token_ids:
            raise Aborted(
                f"request {request.request_id} ended with {finish} after {len(token_ids)} tokens"
            )
        return _unscored(token_ids, logprobs, version, "stop" if finish == "stop" else "length")


def _unscored(
    token_ids: list[int], logprobs: list[float], version: PolicyVersion, finish: Finish
) -> Rollout:
    return Rollout(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        loss_mask=np.ones(len(token_ids), dtype=np.bool_),
        versions=(VersionRun(version, len(token_ids)),),
        reward=None,
        reward_parts={},
        finish=finish,
    )
