"""Steps whose loss or gradient is not finite: skipped, their groups settled once, their batches kept."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest

from spotgrpo.consumer.dead import list_dead
from spotgrpo.consumer.retention import SKIPPED_STEPS
from spotgrpo.consumer.skips import MOST_IN_A_ROW, RECORD, SkippedStep
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ids import SkippedId
from spotgrpo.shared.manifest import sha256_hex
from spotgrpo.shared.steps import Step, observe
from spotgrpo.shared.wire import Group, decode_group
from tests.loops.test_learner_faults import Background, DownStore, until, worlds
from tests.loops.test_learner_loop import expect_sound_books
from tests.tools.loop_world import (
    BookkeepingTrainer,
    Stats,
    ThreadWorker,
    World,
    config_of,
    flatten,
)

__all__ = ["worlds"]


class Killed(Exception):
    """Stands for SIGKILL: unwinds the learner at a chosen point."""


@pytest.fixture(autouse=True)
def nobody_watches() -> Iterator[None]:
    yield
    observe(None)


class WildTrainer(BookkeepingTrainer):
    """Skips the calls of :meth:`step` whose numbers (from 0) are given; ``skipped`` has the tasks of each."""

    def __init__(self, *calls: int) -> None:
        super().__init__()
        self._calls, self._left = 0, set(calls)
        self.skipped: list[list[str]] = []

    def step(self, groups: Sequence[Group]) -> Stats:
        self._calls += 1
        if self._calls - 1 not in self._left:
            return super().step(groups)
        self.skipped.append([str(group.task_id) for group in groups])
        return Stats(
            tokens=9, loss=math.nan, grad_norm=math.inf, mismatch_kl=math.nan, skipped=True
        )


def kept(world: World) -> dict[str, SkippedStep]:
    """The records in the bucket, each found to be whole."""
    found = {}
    for info in world.store.list(world.keys.replays):
        if info.key.endswith(RECORD):
            record = SkippedStep.from_bytes(world.store.get(info.key).body)
            expect_whole(world, record)
            found[str(record.id)] = record
    return found


def expect_whole(world: World, record: SkippedStep) -> None:
    for entry in record.groups:
        body = world.store.get(world.keys.replay(record.id, entry.task)).body
        assert (len(body), sha256_hex(body)) == (entry.size, entry.sha256)
        assert str(decode_group(body).task_id) == entry.task
    state = world.store.get(record.state).body
    assert sha256_hex(state) == record.state_sha256
    assert len(json.loads(state)) == record.version, "the state is not of the version before"
    assert sha256_hex(world.store.get(record.manifest).body) == record.manifest_sha256


def records(world: World) -> list[dict[str, Any]]:
    lines = (world.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def expect_untrained(world: World, tasks: Collection[str]) -> None:
    assert not set(flatten(world.durable_steps())) & set(tasks)


def test_a_skipped_step_makes_no_version_and_the_run_goes_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = WildTrainer(3)
    with ThreadWorker(world):
        summary = world.learner(config_of(max_steps=5), trainer).run()
    assert summary["ended"] == "done"
    assert (summary["steps_skipped"], summary["groups_dead"]) == (1, 2)
    assert summary["groups_trained"] == 10
    expect_sound_books(world, steps=5)
    expect_untrained(world, trainer.skipped[0])
    (record,) = kept(world).values()
    assert str(record.id) == "v00000003.e0001.1"
    assert [entry.task for entry in record.groups] == trainer.skipped[0]
    assert (record.loss, record.grad_norm) == ("nan", "inf")
    assert record.settings["train"]["max_steps"] == 5
    assert "loss nan, gradient norm inf" in caplog.text
    (line,) = [line for line in records(world) if line["skipped"]]
    assert (line["version"], line["loss"], line["grad_norm"]) == (3, None, None)
    assert line["steps_skipped"] == records(world)[-1]["steps_skipped"] == 1


def test_prompts_of_a_skipped_step_are_tried_again_and_people_see_what_became_of_it(
    world: World,
) -> None:
    trainer = WildTrainer(1)
    with ThreadWorker(world):
        world.learner(config_of(max_steps=5), trainer).run()
    again = {task.removesuffix(".1") + ".2" for task in trainer.skipped[0]}
    assert again <= set(flatten(world.durable_steps()))
    listed = {one.task: one for one in list_dead(world.store, world.keys).tasks}
    assert sorted(listed) == sorted(trainer.skipped[0])
    for one in listed.values():
        assert one.stands == "tried again"
        assert "spotgrpo replay CONFIG v00000001.e0001.1" in one.what


def test_three_in_a_row_end_the_run_with_balanced_books_and_another_learner_goes_on(
    world: World,
) -> None:
    trainer = WildTrainer(2, 3, 4)
    with ThreadWorker(world):
        learner = world.learner(config_of(max_steps=5), trainer)
        with pytest.raises(SpotGRPOError, match="3 steps in a row") as caught:
            learner.run()
    assert caught.value.exit_code == 1
    assert "learning_rate" in str(caught.value)
    assert "spotgrpo replay CONFIG v00000002.e0001.3" in str(caught.value)
    assert list(kept(world)) == [f"v00000002.e0001.{n}" for n in (1, 2, 3)]
    report = world.audit()
    assert (report.balanced, report.version, report.dead) == (True, 2, 6)
    assert len(world.durable_steps()) == 2
    with ThreadWorker(world):
        assert world.learner(config_of(max_steps=5)).run()["ended"] == "done"
    expect_sound_books(world, steps=5)
    expect_untrained(world, flatten(trainer.skipped))
    assert len(kept(world)) == 3, "the state that they were taken at is kept, and it fits"


def test_a_run_ends_only_once_its_last_groups_are_settled_whatever_the_bucket_does(
    worlds: Callable[[Any], World],
) -> None:
    store, trainer = DownStore("/ledger/"), WildTrainer(1, 2, 3)
    world = worlds(store)

    def take_away(at: Step) -> None:
        if at is Step.LEARNER_SKIP_RECORDED and len(trainer.skipped) == 3:
            store.down = True

    observe(take_away)
    with ThreadWorker(world):
        learner = Background(world.learner(config_of(), trainer).run)
        until(lambda: store.down)
        assert not learner.ends(0.5)
        store.down = False
        assert learner.ends()
    assert "3 steps in a row" in str(learner.error)
    assert world.audit().dead == 6


def test_a_step_that_is_taken_begins_the_count_anew(world: World) -> None:
    trainer = WildTrainer(1, 2, 4, 5)
    with ThreadWorker(world):
        summary = world.learner(config_of(max_steps=4), trainer).run()
    assert (summary["ended"], summary["steps_skipped"]) == ("done", 4)
    expect_sound_books(world, steps=4)
    assert [len(tasks) for tasks in trainer.skipped] == [2] * 4


def test_the_bucket_keeps_the_newest_few_with_their_states_and_no_more(world: World) -> None:
    with ThreadWorker(world):
        world.learner(config_of(max_steps=8), WildTrainer(0, 2, 4, 6, 7)).run()
    expect_sound_books(world, steps=8)
    assert list(kept(world)) == ["v00000002.e0001.1", "v00000003.e0001.1", "v00000003.e0001.2"]
    assert len(kept(world)) == SKIPPED_STEPS == MOST_IN_A_ROW
    left = {info.key.split("/")[2] for info in world.store.list(world.keys.replays)}
    assert left == set(kept(world)), "something is left of older ones"
    versions = {info.key.split("/")[2] for info in world.store.list(world.keys.versions)}
    assert versions == {f"v{n:08d}.e0001" for n in (2, 3, 5, 6, 7, 8)}
    states = [info.key for info in world.store.list(world.keys.states)]
    assert states == [f"{world.keys.states}v{n:08d}.e0001.safetensors" for n in (2, 3, 8)]


@pytest.mark.parametrize("durable_every", [1, 3])
def test_a_learner_killed_once_the_batch_is_stored_redoes_the_step(
    world: World, durable_every: int
) -> None:
    """Nothing of it was settled: the same groups come back, and are trained where they can be now."""

    def kill(at: Step) -> None:
        if at is Step.LEARNER_SKIP_RECORDED:
            raise Killed

    observe(kill)
    first = WildTrainer(2)
    with ThreadWorker(world):
        config = config_of(max_steps=6, durable_every=durable_every)
        with pytest.raises(Killed):
            world.learner(config, first).run()
        (record,) = kept(world).values()
        assert world.audit().dead == 0
        observe(None)
        assert world.learner(config).run()["ended"] == "done"
    assert set(first.skipped[0]) <= set(flatten(world.durable_steps()))
    assert world.audit().dead == 0
    expect_sound_books(world, steps=6)
    assert list(kept(world)) == [str(record.id)]
    assert {one.stands for one in list_dead(world.store, world.keys).tasks} == {
        "not settled as dead"
    }


def test_one_killed_between_the_settling_commit_and_its_acks_leaves_duplicates(
    world: World,
) -> None:
    is_recorded = threading.Event()

    def kill(at: Step) -> None:
        if at is Step.LEARNER_SKIP_RECORDED:
            is_recorded.set()
        if at is Step.LEARNER_DURABLE and is_recorded.is_set():
            raise Killed

    observe(kill)
    first = WildTrainer(2)
    with ThreadWorker(world):
        with pytest.raises(Killed):
            world.learner(config_of(max_steps=6), first).run()
        observe(None)
        world.learner(config_of(max_steps=6)).run()
    expect_sound_books(world, steps=6)
    expect_untrained(world, first.skipped[0])
    report = world.audit()
    assert report.dead == 2
    assert report.duplicate >= 2


def test_with_versions_that_are_not_durable_the_one_that_was_left_is_made_so_first(
    world: World,
) -> None:
    """Else no state would be there to replay from: ``kept`` looks at its version."""
    with ThreadWorker(world):
        config = config_of(max_steps=9, durable_every=4, max_staleness=6)
        world.learner(config, WildTrainer(2, 3, 7)).run()
    assert list(kept(world)) == ["v00000002.e0001.1", "v00000002.e0001.2", "v00000005.e0001.1"]
    expect_sound_books(world, steps=9)


def test_a_learner_told_to_stop_while_the_batch_cannot_be_stored_settles_nothing(
    worlds: Callable[[Any], World],
) -> None:
    store = DownStore("/replay/")
    world, stopping, trainer = worlds(store), threading.Event(), WildTrainer(2)
    store.down = True
    with ThreadWorker(world):
        learner = Background(world.learner(config_of(), trainer, stopping).run)
        until(lambda: trainer.skipped)
        stopping.set()
        assert learner.ends()
    assert learner.error is None
    assert world.audit().dead == 0
    store.down = False
    with ThreadWorker(world):
        world.learner(config_of()).run()
    expect_sound_books(world, steps=6)
    assert set(trainer.skipped[0]) <= set(flatten(world.durable_steps()))
    assert not kept(world)


def test_an_id_of_a_skipped_step_has_one_spelling() -> None:
    step = SkippedId(epoch=3, version=42, number=2)
    assert SkippedId.parse(str(step)) == step
    for text in ("v00000042.e0003", "v00000042.e0003.0", "v00000042.e0003.02", "2", ""):
        with pytest.raises(SpotGRPOError):
            SkippedId.parse(text)
