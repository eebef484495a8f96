"""Segments: where they end; that a rollout in segments is the one in one piece; who moves to which version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from spotgrpo.producer.engines.base import Chunk, GenerationRequest
from spotgrpo.producer.engines.ends import Ends
from spotgrpo.producer.partials import last_of_each
from spotgrpo.producer.policy import Adopted, PolicyWatcher
from spotgrpo.producer.room import Room
from spotgrpo.producer.sampler import Draft, Sampler
from spotgrpo.producer.saving import LEAST_PAUSE, pause_after
from spotgrpo.producer.segments import (
    GroupVersions,
    SegmentCounts,
    is_border,
    segment_of,
    too_old,
)
from spotgrpo.shared.ids import Keys, PolicyVersion, TaskId
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import ObjectInfo
from spotgrpo.shared.wire import Finish, Sampling, Task, VersionRun
from tests.tools.loop_world import config_of, document_of
from tests.tools.scripted_engine import ScriptedEngine, scripted_token

WHOLE = Sampling(max_new_tokens=10, temperature=0.7, stop=("ab",))


def v(number: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, number)


# ---- where a segment ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "segment_tokens", "limit"),
    [(0, None, 10), (0, 4, 4), (4, 4, 8), (5, 4, 9), (6, 4, 10), (8, 4, 10), (0, 10, 10), (0, 99, 10)],
)  # fmt: skip
def test_a_segment_is_asked_for_what_is_there_and_some_more(
    tokens: int, segment_tokens: int | None, limit: int
) -> None:
    segment = segment_of(WHOLE, tokens, segment_tokens)
    assert segment == replace(WHOLE, max_new_tokens=limit)


@pytest.mark.parametrize(
    ("finish", "tokens", "asked", "border"),
    [
        ("length", 4, 4, True),
        ("stop", 4, 4, False),
        ("length", 3, 4, False),  # the context is full
        ("length", 10, 10, False),
    ],
)
def test_only_the_limit_of_a_segment_is_a_border(
    finish: Finish, tokens: int, asked: int, border: bool
) -> None:
    assert is_border(finish, tokens, replace(WHOLE, max_new_tokens=asked), WHOLE) is border


class Letters:
    """Three letters, so that a stop string comes about by itself."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("abc"[one % 3] for one in token_ids)


class Ending(ScriptedEngine):
    """Ends completions as real engines do."""

    def __init__(self, max_context: int) -> None:
        super().__init__()
        self.ends = Ends(Letters(), frozenset({0}), max_context, 1000)
        self.requests = 0

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self.requests += 1
        completion = list(request.prefix_ids)
        finish = self.ends.finish(request, completion)
        if finish is not None:
            yield Chunk((), (), finish)
        while finish is None:
            token, logprob = scripted_token(request.seed, request.version, len(completion))
            completion.append(token)
            finish = self.ends.finish(request, completion)
            yield Chunk((token,), (logprob,), finish)


def watcher(engine: ScriptedEngine, *numbers: int) -> PolicyWatcher:
    """A watcher that has loaded these versions and serves the last."""
    policy = PolicyWatcher(
        MemoryStore(), Keys("r"), engine, document_of(config_of()),
        cache_dir=Path("unused"), poll_s=1.0, keep=4,
    )  # fmt: skip
    for number in numbers:
        policy.current = Adopted(v(number), "0" * 64, Path("unused"), "pass")
        policy._loaded[v(number)] = policy.current
    return policy


def task_of(sampling: Sampling, seeds: int = 1, **changes: object) -> Task:
    task = Task(
        run="r",
        task_id=TaskId(1),
        prompt_ids=(1, 2),
        prompt="p",
        row={},
        sampling=sampling,
        seeds=tuple(range(seeds)),
    )
    return replace(task, **changes)  # type: ignore[arg-type]


async def sampled(
    engine: Ending, task: Task, segment_tokens: int | None
) -> list[tuple[list[int], list[float], Finish]]:
    policy = watcher(engine, 5)
    adopted = policy.current
    assert adopted is not None
    with GroupVersions(policy, task, adopted, SegmentCounts(), switches=False) as versions:
        sampler = Sampler(engine, lambda tokens: None, segment_tokens)
        with Room(5).seats(len(task.seeds)) as seats:
            drafts = [Draft(seed) for seed in task.seeds]
            group = await sampler.sample(task, versions, drafts, seats)
    assert adopted.in_flight == 0
    return [(one.token_ids.tolist(), one.logprobs.tolist(), one.finish) for one in group.rollouts]


@pytest.mark.parametrize("segment_tokens", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("stop", "stop_token_ids", "max_context"),
    [((), (), 99), (("abca", "cccc"), (), 99), ((), tuple(range(9, 15)), 99), ((), (), 22)],
    ids=["limit", "stop strings", "stop tokens", "context"],
)
def test_a_rollout_in_segments_ends_where_one_request_does(
    segment_tokens: int, stop: tuple[str, ...], stop_token_ids: tuple[int, ...], max_context: int
) -> None:
    sampling = Sampling(40, stop=stop, stop_token_ids=stop_token_ids)
    task = task_of(sampling, seeds=12)
    one, many = Ending(max_context), Ending(max_context)
    whole = asyncio.run(sampled(one, task, None))
    assert asyncio.run(sampled(many, task, segment_tokens)) == whole
    assert one.requests == 12
    assert (many.requests > 12) == (segment_tokens < 40)
    if stop:  # and they were found over borders, not within one segment alone
        assert {finish for _, _, finish in whole} == {"stop", "length"}


# ---- versions ---------------------------------------------------------------------------------------------------


def walk(
    policy: PolicyWatcher, task: Task, switches: bool, newer: int, counts: SegmentCounts
) -> list[PolicyVersion]:
    """The versions of two segments, with ``newer`` adopted in between."""
    first = policy.current
    assert first is not None
    found = []
    with GroupVersions(policy, task, first, counts, switches=switches) as versions:
        with versions.segment(None) as version:
            found.append(version)
        policy.current = Adopted(v(newer, 2), "0" * 64, Path("unused"), "pass")
        with versions.segment(version) as version:
            found.append(version)
        held = versions.adopted
        assert held.in_flight == 1
    assert held.in_flight == first.in_flight == 0
    return found


@pytest.mark.parametrize(
    ("switches", "pinned", "newer", "moves"),
    [
        (True, None, 6, True),
        (False, None, 6, False),
        (True, v(5), 6, False),
        (True, None, 4, True),  # a takeover: what is served now is what the learner trains
        (True, None, 1, False),  # older than the task asks for
    ],
)
def test_who_moves_to_the_version_that_is_served(
    switches: bool, pinned: PolicyVersion | None, newer: int, moves: bool
) -> None:
    task = task_of(WHOLE, pinned=pinned, min_version=2)
    counts = SegmentCounts()
    found = walk(watcher(ScriptedEngine(), 5), task, switches, newer, counts)
    assert found == [v(5), v(newer, 2) if moves else v(5)]
    assert counts == SegmentCounts(switched=int(moves))


@pytest.mark.parametrize("pinned", [None, v(3)])
def test_who_is_to_stay_leaves_the_oldest_version_once_room_is_needed(
    pinned: PolicyVersion | None,
) -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        policy = watcher(engine, 3, 4, 5, 6)
        old, middle = policy._loaded[v(3)], policy._loaded[v(4)]
        policy.hold(policy._loaded[v(5)])
        counts = SegmentCounts()
        task = task_of(WHOLE, pinned=pinned)
        with (
            GroupVersions(policy, task, old, counts, switches=False) as versions,
            GroupVersions(policy, task_of(WHOLE), middle, counts, switches=False) as others,
        ):
            with versions.segment(v(3)) as version:
                assert version == v(3)
            waiting = asyncio.create_task(policy._make_room())
            await asyncio.sleep(0.01)
            assert not waiting.done()
            with others.segment(v(4)) as version:
                assert version == v(4)
            with versions.segment(v(3)) as version:
                assert version == (pinned or v(6))
            await asyncio.sleep(0.05)
            assert waiting.done() is (pinned is None)
            with others.segment(v(4)) as version:
                assert version == v(4)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        made = int(pinned is None)
        assert counts == SegmentCounts(switched=made, made_room=made)

    asyncio.run(story())


def test_rollouts_that_no_learner_can_train_are_told() -> None:
    rollouts = [
        [VersionRun(v(3), 1), VersionRun(v(6), 9)],
        [VersionRun(v(4), 1)],
        [VersionRun(v(9), 1)],  # of a version that a takeover gave up
        [],
    ]
    assert too_old(rollouts, v(6, 2), 2) == 1
    assert too_old(rollouts, v(5, 2), 2) == 0


# ---- saving -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("took_s", "pause_s"), [(0.0, 4.5), (0.5, 3.5), (1.5, 1.5), (9.0, 5.0 * LEAST_PAUSE)]
)
def test_what_a_round_takes_comes_off_its_pause(took_s: float, pause_s: float) -> None:
    assert pause_after(took_s, 5.0) == pytest.approx(pause_s)


def test_of_each_workers_partials_the_last_is_looked_at() -> None:
    keys = Keys("r")
    names = [("host.a", 2), ("host.a", 11), ("host.a", 9), ("b", 1), ("b.1", 3)]
    infos = [
        ObjectInfo(key=keys.partial(TaskId(1), worker, number), size=1, modified=0.0)
        for worker, number in names
    ]
    other = ObjectInfo(key=keys.partials_of(TaskId(1)) + "x.y", size=1, modified=0.0)
    assert last_of_each([*infos, other]) == [infos[1], infos[3], infos[4], other]
