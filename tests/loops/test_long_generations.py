"""Long rollouts with whole worker loops: segments, moves between versions, and saves that a kill does not take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from spotgrpo.producer.engines.base import Chunk, GenerationRequest
from spotgrpo.shared.errors import ConfigError, StoreUnavailable
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import VersionRun
from tests.loops.test_partials import (
    Recording,
    Stuck,
    TroubledStore,
    expect_scripted,
    finished,
    partials,
)
from tests.loops.test_worker_loop import Bench, run, serves, until, working
from tests.tools.scripted_engine import ScriptedEngine

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
TOKENS = 40
MAX_STALENESS = 2
TOKEN_S = 0.02


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, store=TroubledStore())
    bench.open()
    yield bench
    bench.broker.close()


@pytest.fixture
def troubled(bench: Bench) -> Iterator[TroubledStore]:
    assert isinstance(bench.store, TroubledStore)
    yield bench.store
    bench.store.release.set()


# ---- segments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_tokens", [1, 7, TOKENS, 1000])
def test_segments_give_the_tokens_of_one_request(bench: Bench, segment_tokens: int) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        engine = Recording()
        async with working(bench, engine, segment_tokens=segment_tokens) as (worker, _, _):
            (group,) = await bench.answers(1)
            await until(lambda: not worker._jobs)
            assert worker._values()["rollouts_switched"] == 0
        for seed in (0, 1):
            expect_scripted(group, [VersionRun(V0, TOKENS)], seed)
            assert group.rollouts[seed].finish == "length"
        assert set(engine.sampled.values()) == {1}
        assert engine.sampled.total() == 2 * TOKENS
        assert len(engine.served) == 2 * -(-TOKENS // segment_tokens)

    run(story)


@pytest.mark.parametrize(
    ("options", "pinned", "moves"),
    [
        ({"segment_tokens": 8, "inflight": "switch"}, None, True),
        ({"segment_tokens": 8, "inflight": "switch"}, V0, False),
        ({"segment_tokens": 8}, None, False),
        ({}, None, False),
    ],
    ids=["switch", "pinned", "finish", "one request"],
)
def test_a_running_rollout_moves_at_a_border_only_where_it_is_to_switch(
    bench: Bench, options: dict[str, object], pinned: PolicyVersion | None, moves: bool
) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = Recording(TOKEN_S)
        async with working(bench, engine, **options) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            bench.ask(0, tokens=TOKENS, pinned=pinned)
            await until(lambda: engine.sampled.total() >= 4)
            bench.commit(1)
            (group,) = await bench.answers(1)
            assert serves(worker, 1)
            await until(lambda: not worker._jobs)
            values = worker._values()
        for seed in (0, 1):
            runs = group.rollouts[seed].versions
            expect_scripted(group, runs, seed)
            if moves:
                k = runs[0].tokens
                assert runs == (VersionRun(V0, k), VersionRun(V1, TOKENS - k))
                assert k % 8 == 0
            else:
                assert runs == (VersionRun(V0, TOKENS),)
        moved = 2 if moves else 0
        assert (values["rollouts_switched"], values["rollouts_made_room"]) == (moved, 0)
        assert values["rollouts_stale"] == 0

    run(story)


def test_a_rollout_that_switches_keeps_no_old_version_loaded(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = Recording(0.01)
        engine.max_versions = 2
        options = {"segment_tokens": 4, "inflight": "switch"}
        async with working(bench, engine, **options) as (worker, _, _):
            bench.ask(0, tokens=400)
            for number in range(1, 6):
                seen = engine.sampled.total()
                await until(lambda seen=seen: engine.sampled.total() >= seen + 4)  # type: ignore[misc]
                bench.commit(number)
                await until(lambda number=number: serves(worker, number))  # type: ignore[misc]
            (group,) = await bench.answers(1)
        for seed in (0, 1):
            runs = group.rollouts[seed].versions
            assert [one.version.number for one in runs] == list(range(6))
            expect_scripted(group, runs, seed)

    run(story)


@pytest.mark.parametrize("segment_tokens", [4, None])
def test_whoever_holds_up_a_new_version_leaves_at_its_next_border(
    bench: Bench, segment_tokens: int | None
) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = Recording(TOKEN_S)
        engine.max_versions = 2  # that of the running group, and the newest
        async with working(bench, engine, segment_tokens=segment_tokens) as (worker, _, _):
            bench.ask(0, tokens=TOKENS)
            await until(lambda: engine.sampled.total() >= 4)
            bench.commit(1)
            await until(lambda: serves(worker, 1))
            assert engine.sampled.total() < TOKENS
            bench.commit(2)
            await until(lambda: serves(worker, 2))
            is_over = engine.sampled.total() == 2 * TOKENS
            (group,) = await bench.answers(1)
            await until(lambda: not worker._jobs)
            values = worker._values()
        runs = group.rollouts[0].versions
        expect_scripted(group, runs, 0)
        if segment_tokens is None:
            assert is_over
            assert runs == (VersionRun(V0, TOKENS),)
            assert values["rollouts_made_room"] == 0
        else:
            assert not is_over
            assert [one.version for one in runs] == [V0, V1]
            assert values["rollouts_made_room"] == values["rollouts_switched"] == 2

    run(story)


@pytest.mark.parametrize("inflight", ["finish", "switch"])
def test_rollouts_that_took_too_long_to_be_trained_are_counted_and_told(
    bench: Bench, caplog: pytest.LogCaptureFixture, inflight: str
) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = Recording(TOKEN_S)
        options = {"segment_tokens": 8, "inflight": inflight}
        async with working(bench, engine, **options) as (worker, _, _):
            bench.ask(0, tokens=TOKENS)
            await until(lambda: engine.sampled.total() >= 4)
            bench.commit(MAX_STALENESS + 1)
            (group,) = await bench.answers(1)  # it is the learner that drops it
            bench.ask(1)
            await bench.answers(1)
            assert worker._values()["rollouts_stale"] == 2
        assert group.rollouts[0].versions[0].version == V0

    run(story)
    assert caplog.text.count("take too long to be trained") == 1


# ---- saves ------------------------------------------------------------------------------------------------------


class Timed(Recording):
    """Writes down when it sampled each token."""

    def __init__(self, token_s: float) -> None:
        super().__init__(token_s)
        self.times: list[float] = []

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        async for chunk in super().submit(request):
            self.times += [time.time()] * len(chunk.token_ids)
            yield chunk


async def killed_at_its_worst(
    bench: Bench, store: TroubledStore, engine: Timed, saves: int, **options: object
) -> None:
    """Kill a worker without notice just before its next save is in the bucket."""
    async with working(bench, engine, **options) as (_, _, running):
        await until(lambda: len(partials(bench)) >= saves)
        store.is_silent = True
        await until(lambda: store.waiting > 0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert len(partials(bench)) == saves
    store.is_silent = False


@pytest.mark.parametrize("inflight", ["finish", "switch"])
def test_a_worker_killed_without_notice_loses_no_more_than_it_sampled_since_its_last_save(
    bench: Bench, troubled: TroubledStore, inflight: str
) -> None:
    every_s, tokens = 1.0, 300

    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=tokens)
        troubled.slow_s = 0.2
        first, second = Timed(0.01), Recording()
        options = {"segment_tokens": 16, "inflight": inflight, "partial_every_s": every_s}
        await killed_at_its_worst(bench, troubled, first, 2, **options)
        kept = partials(bench)[-1]
        assert 0 < kept.tokens < first.sampled.total() < 2 * tokens
        bench.commit(1)
        (group,), worker = await finished(bench, second)
        for seed in (0, 1):
            k = len(kept.rollouts[seed].token_ids)
            expect_scripted(group, [VersionRun(V0, k), VersionRun(V1, tokens - k)], seed)
        both = first.sampled + second.sampled
        assert len(both) == 2 * tokens
        twice = sum(count == 2 for count in both.values())
        since_the_save = sum(at >= kept.saved_at for at in first.times)
        assert 0 < twice == first.sampled.total() - kept.tokens <= since_the_save
        assert worker._values()["tokens_resumed"] == kept.tokens

    run(story)


def test_a_save_keeps_the_versions_of_a_rollout_that_switched(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        engine = Recording(TOKEN_S)
        options = {"segment_tokens": 4, "inflight": "switch", "partial_every_s": 0.1}
        async with working(bench, engine, **options) as (worker, _, running):
            await until(lambda: engine.sampled.total() >= 4)
            bench.commit(1)
            await until(lambda: serves(worker, 1))
            await until(lambda: any(len(one.rollouts[1].versions) == 2 for one in partials(bench)))
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        kept = max(partials(bench), key=lambda one: one.tokens)
        bench.commit(2)
        (group,), _ = await finished(bench, Recording())
        for seed in (0, 1):
            runs = group.rollouts[seed].versions
            assert [one.version.number for one in runs] == [0, 1, 2]
            assert runs[0] == kept.rollouts[seed].versions[0]
            expect_scripted(group, runs, seed)

    run(story)


def test_a_group_that_has_not_grown_is_not_saved_again(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        engine = Stuck()
        async with working(bench, engine, partial_every_s=0.05, drain_s=0.0) as (worker, _, _):
            await until(lambda: any(one.tokens == 6 for one in partials(bench)))
            saved = len(partials(bench))
            await asyncio.sleep(0.5)
            assert worker._values()["partials_saved"] == len(partials(bench)) == saved
        assert len(partials(bench)) == saved  # nor by the drain
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


@pytest.mark.parametrize("fault", ["away", "refuses", "silent"])
def test_a_bucket_that_takes_no_save_does_not_hold_up_generation(
    bench: Bench,
    troubled: TroubledStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("spotgrpo.producer.saving.STORE_S", 0.2)
    troubled.is_silent = fault == "silent"
    if fault == "away":
        troubled.error = StoreUnavailable("the bucket is away")
    elif fault == "refuses":
        troubled.error = ConfigError("bucket.access_key_id", "w", "403")

    async def story() -> None:
        bench.commit(0)
        engine = Recording(TOKEN_S)
        async with working(bench, engine, partial_every_s=0.1) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            bench.ask(0, tokens=TOKENS)
            began = time.monotonic()
            (group,) = await bench.answers(1)
            assert time.monotonic() - began < 3 * TOKENS * TOKEN_S
            expect_scripted(group, [VersionRun(V0, TOKENS)], 0)
            assert not partials(bench)
            troubled.error, troubled.is_silent = None, False
            bench.ask(1, tokens=TOKENS)
            await bench.answers(1)
            await until(lambda: "running groups are saved again" in caplog.text)
        assert 1 in {one.task_id.index for one in partials(bench)}
        assert set(engine.sampled.values()) == {1}

    run(story)
    assert caplog.text.count("running groups cannot be saved") == 1


def test_without_partial_every_s_nothing_is_saved(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        async with working(bench, ScriptedEngine(TOKEN_S), segment_tokens=4):
            await bench.answers(1)
        assert not partials(bench)

    run(story)
