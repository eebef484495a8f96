"""A worker whose engine stops serving what it says it serves ends, and publishes nothing after that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from spotgrpo.producer import publishing
from spotgrpo.producer.worker import Worker
from spotgrpo.shared.errors import IntegrityError, TransientError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.threads import in_thread
from spotgrpo.shared.wire import Float32Array
from tests.loops.test_worker_loop import Bench, bench, run, serves, until, working
from tests.tools.scripted_engine import ScriptedEngine

__all__ = ["bench"]

V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)
OFTEN = {"probe_every_s": 0.05}


class TurningEngine(ScriptedEngine):
    """An engine that is restarted under its versions: from ``turn`` on it answers with the base's logprobs.

    Attributes:
        turns: of the event loop that a wrong answer takes; None: it is there at once, and requests stay where they are.
        is_away: its servers do not answer.
        lapses: so many of the next answers are wrong, and no later ones.
        may_go_on: until it is set, no request gets its next token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logprob_shift.update({V1: 0.5, V2: 0.7})
        self.turns: int | None = None
        self.has_turned = self.is_away = False
        self.lapses = 0
        self.may_go_on = asyncio.Event()
        self.scored: list[PolicyVersion | None] = []

    async def pause(self) -> None:
        await self.may_go_on.wait()
        await asyncio.sleep(0.001)

    async def abort(self, request_id: str) -> None:
        await super().abort(request_id)
        self.may_go_on.set()

    async def score(self, version: PolicyVersion | None, token_ids: Sequence[int]) -> Float32Array:
        self.scored.append(version)
        if self.is_away:
            raise TransientError("no server is there")
        self.lapses -= 1
        if not self.has_turned and self.lapses < 0:
            return await super().score(version, token_ids)
        if self.turns is not None:
            self.may_go_on.set()
            for _ in range(self.turns):
                await asyncio.sleep(0)
        return np.full(len(token_ids) - 1, -1.0, dtype=np.float32)


def rounds(worker: Worker) -> int:
    """Probes that passed."""
    return worker._w.policy.counts.probes.get("pass", 0)


def test_what_is_served_is_proven_again_while_requests_run(bench: Bench) -> None:
    """Older versions too, as long as something runs on them."""

    async def story() -> None:
        engine = TurningEngine()
        bench.commit(1, shift=0.5)
        async with working(bench, engine, **OFTEN) as (worker, _, _):
            bench.ask(0)
            await until(lambda: len(engine.served) == 2)
            bench.commit(2, shift=0.7)
            await until(lambda: serves(worker, 2))
            engine.scored.clear()
            await until(lambda: {V1, V2} <= set(engine.scored))
            engine.may_go_on.set()
            (group,) = await bench.answers(1)
            assert group.rollouts[0].versions[0].version == V1
            await until(lambda: not worker._w.policy.loaded(V1).in_flight)  # type: ignore[union-attr]
            engine.scored.clear()
            await until(lambda: engine.scored.count(V2) >= 2)
            assert V1 not in engine.scored

    run(story)


def test_a_probe_that_fails_and_passes_when_it_is_tried_once_more_ends_nothing(
    bench: Bench,
) -> None:
    async def story() -> None:
        engine = TurningEngine()
        bench.commit(1, shift=0.5)
        async with working(bench, engine, **OFTEN) as (worker, _, running):
            await until(lambda: rounds(worker) >= 2)
            engine.lapses = 1
            await until(lambda: engine.lapses < 0)
            before = rounds(worker)
            await until(lambda: rounds(worker) > before)
            assert not running.done()
            assert "fail" not in worker._w.policy.counts.probes

    run(story)


@pytest.mark.parametrize("lapses", [1, 2])
def test_a_version_is_refused_where_its_probe_fails_twice(bench: Bench, lapses: int) -> None:
    async def story() -> None:
        engine = TurningEngine()
        engine.lapses = lapses
        bench.commit(1, shift=0.5)
        async with working(bench, engine, probe_every_s=3600.0) as (worker, _, _):
            counts = worker._w.policy.counts
            await until(lambda: bool(counts.probes))
            assert counts.probes == {"fail" if lapses == 2 else "pass": 1}
            await until(lambda: serves(worker, 1) or counts.refused > 0)
            assert serves(worker, 1) == (lapses == 1)

    run(story)


def test_servers_that_do_not_answer_prove_nothing_and_end_nothing(bench: Bench) -> None:
    async def story() -> None:
        engine = TurningEngine()
        bench.commit(1, shift=0.5)
        async with working(bench, engine, **OFTEN) as (worker, _, running):
            await until(lambda: rounds(worker) >= 2)
            engine.is_away = True
            engine.scored.clear()
            await until(lambda: len(engine.scored) >= 2)
            engine.is_away = False
            before = rounds(worker)
            await until(lambda: rounds(worker) > before)
            assert not running.done()

    run(story)


@pytest.mark.parametrize("turns", [*range(0, 30, 2), 40, 60, 100])
def test_nothing_leaves_a_worker_from_the_moment_in_which_a_probe_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Its tasks, whose groups are wherever they got to in so many turns of the event loop, go to others."""
    late: list[str] = []

    async def story() -> None:
        engine = TurningEngine()
        engine.turns = turns
        bench.commit(1, shift=0.5)
        async with working(bench, engine, partial_every_s=0.01, **OFTEN) as (worker, _, running):

            async def watched(call: Callable[[], Any], name: str = "bucket") -> Any:
                if worker._failure.done():
                    late.append(name)
                return await in_thread(call, name)

            monkeypatch.setattr(publishing, "in_thread", watched)
            for index in range(4):
                bench.ask(index, tokens=1)
            await until(lambda: len(engine.served) == 8)
            engine.has_turned = True
            with pytest.raises(
                IntegrityError, match="does not answer as itself any more"
            ) as failed:
                await running
        assert failed.value.exit_code == 5
        assert str(V1) in str(failed.value)
        assert worker._w.policy.counts.probes["fail"] == 1
        published = 0
        while bench.rollouts.take(0.1) is not None:
            published += 1
        await until(lambda: bench.ready(bench.queues.tasks) >= 4 - published)

    run(story)
    assert not late


@pytest.mark.parametrize("turns", range(6))
def test_a_probe_that_fails_in_the_moment_of_a_stop_leaves_no_partial_behind(
    bench: Bench, turns: int
) -> None:
    """In each of the turns of the event loop from the one to the other; a probe that comes later is not made."""

    async def story() -> None:
        engine = TurningEngine()
        bench.commit(1, shift=0.5)
        async with working(bench, engine, **OFTEN) as (worker, _, running):
            engine.may_go_on.set()
            bench.ask(0, tokens=1000)
            await until(lambda: worker._tokens >= 2)
            engine.may_go_on.clear()
            policy = worker._w.policy
            prove = policy.prove

            async def stop_and_prove(*args: Any) -> str:
                if engine.has_turned:
                    policy.finished.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
                return await prove(*args)

            policy.prove = stop_and_prove  # type: ignore[method-assign]
            engine.has_turned = True
            await asyncio.wait({running}, timeout=10)
            has_failed = "fail" in policy.counts.probes
            assert isinstance(running.exception(), IntegrityError) == has_failed
        partials = [one.key for one in bench.store.list("") if "partials" in one.key]
        assert not (has_failed and partials)

    run(story)
