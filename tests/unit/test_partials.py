"""Partials: which one is carried on, by table; what a draft keeps; how much time a drain has."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from spotgrpo.producer.engines.base import Chunk
from spotgrpo.producer.partials import (
    Partials,
    belongs_to,
    can_be_trained,
    choose,
    comes_again,
    marked_again,
)
from spotgrpo.producer.patience import HAND_BACK_S, RESERVE_S, Patience
from spotgrpo.producer.sampler import Draft
from spotgrpo.shared.errors import ConfigError, StoreUnavailable
from spotgrpo.shared.ids import Keys, PolicyVersion, TaskId
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Delivery, Handle, Message
from spotgrpo.shared.stopping import Stopping
from spotgrpo.shared.wire import (
    AGAIN,
    Partial,
    PartialRollout,
    Sampling,
    Task,
    VersionRun,
    decode_partial,
    encode_partial,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STALENESS = 2
TASK = Task(
    run="r",
    task_id=TaskId(7),
    prompt_ids=(1, 2),
    prompt="p",
    row={},
    sampling=Sampling(max_new_tokens=9),
    seeds=(0, 1),
)


def v(number: int, epoch: int = 1) -> PolicyVersion:
    return PolicyVersion(epoch, number)


def partial_of(*rollouts: Sequence[tuple[PolicyVersion, int]], task: Task = TASK) -> Partial:
    """A partial whose rollouts have these runs of tokens."""
    return Partial(
        run=task.run,
        task_id=task.task_id,
        worker="w",
        prompt_ids=np.array(task.prompt_ids, np.int32),
        sampling=task.sampling,
        rollouts=tuple(
            PartialRollout(
                seed=seed,
                token_ids=np.arange(sum(tokens for _, tokens in runs), dtype=np.int32),
                logprobs=-np.arange(sum(tokens for _, tokens in runs), dtype=np.float32) / 8,
                versions=tuple(VersionRun(version, tokens) for version, tokens in runs),
                finish=None,
            )
            for seed, runs in zip(task.seeds, rollouts, strict=True)
        ),
        saved_at=1.0,
    )


# ---- choosing ---------------------------------------------------------------------------------------------------

TRAINABLE: list[tuple[str, list[list[tuple[PolicyVersion, int]]], PolicyVersion, bool]] = [
    ("of the version served", [[(v(5), 3)], [(v(5), 1)]], v(5), True),
    ("some rollouts without a token", [[(v(5), 3)], []], v(5), True),
    ("as stale as is allowed", [[(v(3), 3)], [(v(4), 1)]], v(5), True),
    ("one token too stale", [[(v(2), 1), (v(5), 9)], [(v(5), 1)]], v(5), False),
    ("too stale", [[(v(2), 3)], [(v(2), 3)]], v(5), False),
    ("of a version given up in a takeover", [[(v(6), 3)], []], v(5), False),
    ("partly of a version given up", [[(v(4), 3)], [(v(4), 1), (v(6), 1)]], v(5), False),
    ("of a later epoch than is served", [[(v(4, 2), 3)], []], v(5), False),
    ("of an earlier epoch", [[(v(4, 1), 3)], []], v(5, 2), True),
    ("without any token", [[], []], v(5), False),
]


@pytest.mark.parametrize(
    ("rollouts", "served", "usable"),
    [case[1:] for case in TRAINABLE],
    ids=[case[0] for case in TRAINABLE],
)
def test_rule_9_a_partial_is_used_only_if_it_can_still_be_trained(
    rollouts: list[list[tuple[PolicyVersion, int]]], served: PolicyVersion, usable: bool
) -> None:
    assert can_be_trained(partial_of(*rollouts), TASK, served, MAX_STALENESS, {}) is usable


@pytest.mark.parametrize(
    ("takeovers", "usable"), [({}, True), ({2: 5}, True), ({2: 4}, True), ({2: 3}, False)]
)
def test_rule_9_a_token_of_a_version_given_up_counts_as_what_the_takeover_resumed_from(
    takeovers: dict[int, int], usable: bool
) -> None:
    partial = partial_of([(v(5), 3)], [])
    assert can_be_trained(partial, TASK, v(6, 2), MAX_STALENESS, takeovers) is usable


@pytest.mark.parametrize(
    ("pinned", "served", "runs", "usable"),
    [
        (v(5), v(5), [(v(5), 3)], True),
        (v(5), v(5), [(v(4), 3)], False),
        (v(5), v(5), [(v(4), 1), (v(5), 3)], False),
        (v(5), v(6), [(v(5), 3)], False),  # not loaded any more: sampled on another
    ],
)
def test_a_pinned_task_goes_on_only_on_its_own_version(
    pinned: PolicyVersion,
    served: PolicyVersion,
    runs: list[tuple[PolicyVersion, int]],
    usable: bool,
) -> None:
    task = replace(TASK, pinned=pinned)
    assert can_be_trained(partial_of(runs, []), task, served, MAX_STALENESS, {}) is usable


def test_a_partial_is_no_older_than_its_task_asks_for() -> None:
    partial = partial_of([(v(4), 3)], [])
    assert can_be_trained(partial, replace(TASK, min_version=4), v(5), MAX_STALENESS, {})
    assert not can_be_trained(partial, replace(TASK, min_version=5), v(5), MAX_STALENESS, {})


def test_the_longest_partial_that_can_be_trained_is_chosen() -> None:
    short, long, stale = (
        partial_of([(v(5), 1)], []),
        partial_of([(v(4), 2)], [(v(5), 2)]),
        partial_of([(v(1), 9)], []),
    )
    assert choose([short, long, stale], TASK, v(5), MAX_STALENESS, {}) is long
    assert choose([stale], TASK, v(5), MAX_STALENESS, {}) is None
    assert choose([], TASK, v(5), MAX_STALENESS, {}) is None


@pytest.mark.parametrize(
    ("change", "belongs"),
    [
        ({}, True),
        ({"row": {"x": 1}, "min_version": 3, "pinned": v(5)}, True),
        ({"run": "other"}, False),
        ({"task_id": TaskId(7, 2)}, False),
        ({"prompt_ids": (1, 3)}, False),
        ({"prompt_ids": (1,)}, False),
        ({"sampling": Sampling(max_new_tokens=9, temperature=0.5)}, False),
        ({"seeds": (0,)}, False),
        ({"seeds": (0, 1, 2)}, False),
        ({"seeds": (1, 0)}, False),
    ],
)
def test_a_partial_belongs_to_what_was_asked_then(change: dict[str, Any], belongs: bool) -> None:
    assert belongs_to(partial_of([(v(5), 1)], []), replace(TASK, **change)) is belongs


# ---- messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redelivered", "headers", "again"),
    [(False, {}, False), (True, {}, True), (False, {AGAIN: 1}, True), (False, {AGAIN: 0}, False)],
)
def test_a_task_comes_again_by_redelivery_or_by_its_header(
    redelivered: bool, headers: dict[str, int], again: bool
) -> None:
    assert comes_again(Delivery(Message(b"", "m", headers), Handle(1, 1), redelivered)) is again


def test_a_task_is_handed_back_with_what_its_learner_wrote_and_nothing_of_the_brokers() -> None:
    message = Message(b"body", "00000007.1", {"run": "r", "x-delivery-count": 3})
    assert marked_again(message) == Message(b"body", "00000007.1", {"run": "r", AGAIN: 1})


# ---- drafts -----------------------------------------------------------------------------------------------------


def test_a_draft_goes_on_from_its_partial_to_the_byte() -> None:
    before = partial_of([(v(4), 2)], []).rollouts[0]
    draft = Draft.of(before)
    draft.add(Chunk((7,), (-0.1,)), v(4))
    draft.add(Chunk((), ()), v(5))
    draft.add(Chunk((8, 9), (-0.2, -0.3)), v(5))
    draft.add(Chunk((10,), (-0.4,)), v(5))
    after = draft.partial()
    assert after.token_ids[:2].tobytes() == before.token_ids.tobytes()
    assert after.logprobs[:2].tobytes() == before.logprobs.tobytes()
    assert after.versions == (VersionRun(v(4), 3), VersionRun(v(5), 3))
    assert (draft.brought, len(after.token_ids), after.seed) == (2, 6, before.seed)
    assert draft.rollout("stop").versions == after.versions


# ---- the bucket -------------------------------------------------------------------------------------------------


def drafts_of(partial: Partial, brought: int = 0) -> list[Draft]:
    drafts = [Draft.of(rollout) for rollout in partial.rollouts]
    for draft in drafts:
        draft.brought = brought
    return drafts


def test_what_is_saved_is_found_again() -> None:
    async def story() -> None:
        store, keys = MemoryStore(), Keys("r")
        partial = partial_of([(v(5), 3)], [])
        assert await Partials(store, keys, "host.a", 2).save(TASK, drafts_of(partial), 1.0)
        (key,) = (info.key for info in store.list(""))
        assert key == "r/partials/00000007.1.host.a.1"
        assert keys.task_of(key) == TASK.task_id
        next_worker = Partials(store, keys, "b", 2)
        (found,) = await next_worker.find(TASK)
        assert found.tokens == 3
        assert [len(draft.token_ids) for draft in next_worker.begin(TASK, [found], v(5), {})] == [
            3,
            0,
        ]
        assert next_worker.counts.resumed == 1
        assert next_worker.counts.tokens_resumed == 3
        assert [draft.seed for draft in next_worker.begin(TASK, [found], v(9), {})] == [0, 1]
        assert next_worker.counts.stale == 1

    asyncio.run(story())


def test_nothing_new_is_not_stored() -> None:
    async def story() -> None:
        store = MemoryStore()
        partials = Partials(store, Keys("r"), "w", 2)
        assert not await partials.save(TASK, [Draft(0), Draft(1)], 1.0)
        same = drafts_of(partial_of([(v(5), 3)], [(v(5), 3)]), brought=3)
        assert not await partials.save(TASK, same, 1.0)
        assert not list(store.list(""))

    asyncio.run(story())


def test_what_cannot_be_read_or_is_anothers_is_passed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        store, keys = MemoryStore(), Keys("r")
        right = encode_partial(partial_of([(v(5), 3)], []))
        other = replace(TASK, prompt_ids=(1, 3))
        empty = partial_of([], [])
        bodies = {
            keys.partial(TASK.task_id, "a", 1): right,
            keys.partial(TASK.task_id, "b", 1): right[:-1],
            keys.partial(TASK.task_id, "c", 1): b"junk",
            keys.partial(TASK.task_id, "d", 1): encode_partial(
                partial_of([(v(5), 8)], [], task=other)
            ),
            keys.partial(TASK.task_id, "e", 1): encode_partial(empty),
            keys.partial(TaskId(7, 11), "f", 1): right,  # another task's name
        }
        for key, body in bodies.items():
            store.create(key, body)
        found = await Partials(store, keys, "w", 2).find(TASK)
        assert [partial.tokens for partial in found] == [3]

    asyncio.run(story())
    assert caplog.text.count("cannot be read") == 2
    assert caplog.text.count("does not belong") == 1


class RefusingStore(MemoryStore):
    """Lets nobody write, or does not answer for some calls."""

    def __init__(self, error: Exception, times: int = 1 << 30) -> None:
        super().__init__()
        self.error, self.times, self.calls = error, times, 0

    def create(self, key: str, body: bytes) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        super().create(key, body)


def test_a_worker_that_may_not_store_partials_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        store = RefusingStore(ConfigError("bucket.access_key_id", "w", "403"))
        partials = Partials(store, Keys("r"), "w", 2)
        drafts = drafts_of(partial_of([(v(5), 3)], []))
        assert (
            await asyncio.gather(*(partials.save(TASK, drafts, 5.0) for _ in range(3)))
            == [False] * 3
        )

    asyncio.run(story())
    assert caplog.text.count("403") == 1


def test_a_bucket_that_hiccups_still_gets_the_partial() -> None:
    async def story() -> None:
        store = RefusingStore(StoreUnavailable("away"), times=2)
        partials = Partials(store, Keys("r"), "w", 2)
        assert await partials.save(TASK, drafts_of(partial_of([(v(5), 3)], [])), 5.0)
        (info,) = store.list("")
        assert decode_partial(store.get(info.key).body).tokens == 3

    asyncio.run(story())


def test_a_bucket_that_stays_away_costs_the_partial_and_no_more_time_than_given() -> None:
    async def story() -> None:
        partials = Partials(RefusingStore(StoreUnavailable("away")), Keys("r"), "w", 2)
        drafts = drafts_of(partial_of([(v(5), 3)], []))
        async with asyncio.timeout(2.0):
            assert not await partials.save(TASK, drafts, 0.3)
        assert partials.counts.saved == 0

    asyncio.run(story())


# ---- time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drain_s", "gone_s", "finish_s", "hand_back_s"),
    [
        (20.0, None, 20.0, HAND_BACK_S),
        (0.0, None, 0.0, HAND_BACK_S),
        (20.0, 120.0, 20.0, HAND_BACK_S),
        (20.0, 16.0, 16.0 - HAND_BACK_S - RESERVE_S, HAND_BACK_S),
        (20.0, 4.0, 0.0, 3.0),
        (20.0, 1.0, 0.0, 0.5),
        (20.0, 0.0, 0.0, 0.0),
    ],
)
def test_a_drain_fits_into_what_the_machine_has_left(
    drain_s: float, gone_s: float | None, finish_s: float, hand_back_s: float
) -> None:
    stopping = Stopping()
    stopping.ask("notice", gone_s)
    patience = Patience(drain_s, stopping, clock=lambda: 100.0)
    assert patience.finish_s == pytest.approx(finish_s, abs=0.1)
    assert patience.hand_back_s == pytest.approx(hand_back_s, abs=0.1)


def test_a_notice_that_comes_during_a_drain_shortens_it() -> None:
    now = 100.0
    stopping = Stopping()
    stopping.ask("SIGTERM")
    patience = Patience(20.0, stopping, clock=lambda: now)
    now = 105.0
    assert patience.finish_s == pytest.approx(15.0)
    stopping.ask("notice", 8.0)
    assert patience.finish_s == pytest.approx(8.0 - HAND_BACK_S - RESERVE_S, abs=0.1)
    now = 200.0
    assert patience.finish_s == 0.0
