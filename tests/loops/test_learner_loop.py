"""Whole learner loops on in-memory ports, one story a test."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from spotgrpo.consumer.audit import read_newest
from spotgrpo.consumer.learner import Learner
from spotgrpo.shared.errors import ConfigError, Fenced
from spotgrpo.shared.memory.broker import MemoryBroker
from spotgrpo.shared.ports import Message
from spotgrpo.shared.wire import Group, Task
from tests.tools.loop_world import (
    RUN,
    BookkeepingTrainer,
    ThreadWorker,
    World,
    answer,
    config_of,
    document_of,
    flatten,
    group_message,
)


class Killed(Exception):
    """Stands for SIGKILL in a loop test: unwinds the learner at a chosen point."""


def expect_sound_books(world: World, *, steps: int) -> None:
    """Balanced books, and durable weights that hold every trained task exactly once."""
    report = world.audit()
    assert report.balanced, report.to_dict()
    trained = flatten(world.durable_steps())
    assert len(trained) == len(set(trained)) == report.trained
    assert len(world.durable_steps()) == steps == report.version


def test_a_run_trains_every_version_and_settles_every_task(world: World) -> None:
    with ThreadWorker(world):
        summary = world.learner(config_of(max_steps=6)).run()
    assert summary["ended"] == "done"
    assert summary["groups_outstanding"] == 0
    assert summary["groups_trained"] == 12
    assert world.latest().finished
    expect_sound_books(world, steps=6)
    assert world.ready(world.queues.rollouts) == 0


def test_no_more_tasks_are_outstanding_than_can_be_trained_in_time(world: World) -> None:
    outstanding: list[int] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        outstanding.append(len(world.audit().to_dict()["lost"] or []) + world.audit().outstanding)
        return [answer(task, worker.serving())]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=8, groups_per_step=2, max_staleness=1)).run()
    assert max(outstanding) <= 4
    expect_sound_books(world, steps=8)


def test_a_killed_learner_loses_no_group_and_trains_none_twice(world: World) -> None:
    config = config_of(max_steps=8)
    with ThreadWorker(world):
        for fatal in (2, 4):
            steps = iter(range(100))

            def die_at(fatal: int = fatal, steps: object = steps) -> None:
                if next(steps) == fatal:  # type: ignore[call-overload]
                    raise Killed

            with pytest.raises(Killed):
                world.learner(config, BookkeepingTrainer(die_at)).run()
        world.learner(config).run()
    expect_sound_books(world, steps=8)
    assert world.latest().epoch == 3


def test_a_restart_goes_on_at_the_durable_version(world: World) -> None:
    stopping = threading.Event()
    trainer = BookkeepingTrainer(lambda: stopping.set() if len(trainer.steps) == 2 else None)
    with ThreadWorker(world):
        first = world.learner(config_of(max_steps=6), trainer, stopping).run()
        assert first["ended"] == "stopped"
        at = world.latest().durable.version
        assert at == 3
        second = world.learner(config_of(max_steps=6)).run()
    assert second["versions_this_time"] == 3
    expect_sound_books(world, steps=6)


def test_more_steps_are_allowed_on_a_finished_run(world: World) -> None:
    with ThreadWorker(world):
        world.learner(config_of(max_steps=2)).run()
        assert world.latest().finished
        world.learner(config_of(max_steps=4)).run()
    expect_sound_books(world, steps=4)


def test_a_flat_group_fills_its_slot_and_is_counted(world: World) -> None:
    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        return [answer(task, worker.serving(), flat=task.task_id.index % 2 == 0)]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=4)).run()
    assert summary["groups_flat"]
    expect_sound_books(world, steps=4)


def test_refill_flat_asks_for_other_groups_instead(world: World) -> None:
    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        return [answer(task, worker.serving(), flat=task.task_id.index % 2 == 0)]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=4, refill_flat=True)).run()
    assert all(len(step) == 2 for step in world.durable_steps())
    expect_sound_books(world, steps=4)


@pytest.mark.parametrize("refill_flat", [False, True])
def test_rule_5_a_run_of_flat_groups_does_not_stop_the_issuing(
    world: World, refill_flat: bool
) -> None:
    """Refilled, they never make a batch: only a commit without a step settles them."""

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        return [answer(task, worker.serving(), flat=task.task_id.index < 20)]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=2, refill_flat=refill_flat)).run()
    assert summary["groups_flat"] == 20
    expect_sound_books(world, steps=2)


def test_every_group_published_twice_is_trained_once(world: World) -> None:
    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        return [answer(task, worker.serving(), "a"), answer(task, worker.serving(), "b")]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=6)).run()
        assert isinstance(summary["groups_duplicate"], int)
        assert summary["groups_duplicate"] > 0
    expect_sound_books(world, steps=6)


def test_a_group_that_comes_too_late_is_stale_and_its_prompt_tried_again(world: World) -> None:
    """The first task's group is withheld until it is too old to be trained."""
    late: list[Group] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        version = worker.serving()
        if not late:
            late.append(answer(task, version))
            return []
        held = late if len(late) == 1 and version.number >= 3 else []
        if held:
            late.append(late[0])
        return [*held[:1], answer(task, version)]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=8, max_staleness=2)).run()
    assert summary["groups_stale"] == 1
    first = str(late[0].task_id)
    assert first not in flatten(world.durable_steps())
    assert f"{late[0].task_id.next_attempt()}" in flatten(world.durable_steps())
    expect_sound_books(world, steps=8)


def test_an_unreadable_group_is_dead_lettered_and_its_prompt_tried_again(world: World) -> None:
    """Poison does not stop the learner: the task is dead, its body kept, the next attempt trained."""
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()
    poisoned: list[str] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        if poisoned or task.task_id.attempt > 1:
            return [answer(task, worker.serving())]
        poisoned.append(str(task.task_id))
        good = group_message(answer(task, worker.serving()))
        bad = Message(b"\x00" + good.body, good.message_id, good.headers)
        publisher.publish(world.queues.rollouts, bad).result(5)
        return []

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=6)).run()
    assert summary["groups_dead"] == 1
    assert world.store.get(f"{RUN}/dead/{poisoned[0]}").body.startswith(b"\x00")
    expect_sound_books(world, steps=6)


def test_a_group_sampled_at_another_temperature_is_never_trained(world: World) -> None:
    seen: list[str] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        group = answer(task, worker.serving())
        if not seen:
            seen.append(str(task.task_id))
            return [replace(group, sampling=replace(group.sampling, temperature=0.5))]
        return [group]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=4)).run()
    assert seen[0] not in flatten(world.durable_steps())
    expect_sound_books(world, steps=4)


def test_rule_4_a_wiped_broker_gets_its_tasks_again_under_the_same_ids(world: World) -> None:
    wiped = threading.Event()
    lost: list[int] = []

    def wipe_once() -> None:
        if len(trainer.steps) == 1 and not wiped.is_set():
            lost.append(world.ready(world.queues.tasks))
            world.server.wipe()
            MemoryBroker(world.server, RUN).declare()
            wiped.set()

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        if task.task_id.index >= 4:
            assert wiped.wait(10)
        return [answer(task, worker.serving())]

    trainer = BookkeepingTrainer(wipe_once)
    with ThreadWorker(world, act, prefetch=1):
        world.learner(config_of(max_steps=6, reissue_after_s=0.5), trainer).run()
    assert lost
    assert lost[0] > 0
    expect_sound_books(world, steps=6)


def test_lost_channels_neither_lose_nor_double_a_group(world: World) -> None:
    trainer = BookkeepingTrainer(
        lambda: world.server.drop_connections() if len(trainer.steps) % 2 else None
    )
    with ThreadWorker(world):
        world.learner(config_of(max_steps=8), trainer).run()
    expect_sound_books(world, steps=8)


def test_rule_6_a_learner_that_was_overtaken_is_fenced_and_changes_nothing(world: World) -> None:
    """Another takes the run over while the first is in a step; the first must not commit that step."""
    overtaken: list[bytes] = []

    def overtake() -> None:
        if len(trainer.steps) == 2 and not overtaken:
            stored = world.store.get(world.keys.latest)
            other = world.latest().model_copy(
                update={"epoch": world.latest().epoch + 1, "writer": "other", "nonce": "f" * 32}
            )
            while not world.store.compare_and_swap(
                world.keys.latest, other.to_bytes(), stored.etag
            ):
                stored = world.store.get(world.keys.latest)
            overtaken.append(world.store.get(world.keys.latest).body)

    trainer = BookkeepingTrainer(overtake)
    with ThreadWorker(world), pytest.raises(Fenced):
        world.learner(config_of(max_steps=6), trainer).run()
    assert world.store.get(world.keys.latest).body == overtaken[0]
    assert world.audit().balanced


def test_a_standby_takes_over_when_the_active_learner_dies(world: World) -> None:
    leads = threading.Event()  # the one that is to die has the lease: it trains

    def die() -> None:
        leads.set()
        if len(trainer.steps) == 2:
            raise Killed

    trainer = BookkeepingTrainer(die)
    config = config_of(max_steps=6)
    results: list[dict[str, object]] = []

    def stand_by(learner: Learner) -> None:
        leads.wait(10)
        results.append(learner.run())

    standby = threading.Thread(target=stand_by, args=(world.learner(config),), daemon=True)
    standby.start()
    with ThreadWorker(world):
        with pytest.raises(Killed):
            world.learner(config, trainer).run()
        standby.join(20)
    assert results
    assert results[0]["ended"] == "done"
    expect_sound_books(world, steps=6)


def test_rule_3_durable_every_n_versions_acks_nothing_in_between(world: World) -> None:
    acked_early: set[str] = set()

    def die() -> None:
        if len(trainer.steps) == 3:
            in_hand = {
                str(stored.message.headers["task"])
                for consumer in world.server.consumers
                for stored in list(consumer._unsettled.values())
            }
            outstanding = map(str, read_newest(world.store, world.latest()).outstanding)
            acked_early.update({*flatten(trainer.steps)} & {*outstanding} - in_hand)
            raise Killed

    trainer = BookkeepingTrainer(die)
    config = config_of(max_steps=8, durable_every=2, max_staleness=3)
    with ThreadWorker(world):
        with pytest.raises(Killed):
            world.learner(config, trainer).run()
        assert not acked_early
        assert world.latest().serving.version >= world.latest().durable.version
        world.learner(config).run()
    expect_sound_books(world, steps=8)


@pytest.mark.parametrize(
    ("part", "named"),
    [({"name": "other"}, "model.name"), ({"base": "f" * 64}, "model.base_sha256")],
)
def test_a_run_id_of_another_model_is_refused_with_both_values(
    world: World, part: dict[str, str], named: str
) -> None:
    config = config_of(max_steps=2)
    with ThreadWorker(world):
        world.learner(config).run()
    with pytest.raises(ConfigError, match=named):
        world.learner(config, document=document_of(config, **part)).run()


def test_retention_keeps_what_workers_may_still_need(world: World) -> None:
    with ThreadWorker(world):
        world.learner(config_of(max_steps=9, max_staleness=1, keep_every=4)).run()
    manifests = [
        info.key
        for info in world.store.list(world.keys.versions)
        if info.key.endswith("manifest.json")
    ]
    numbers = sorted(int(key.split("/v")[-1].split(".")[0]) for key in manifests)
    assert numbers == [0, 4, 7, 8, 9]
    assert len(list(world.store.list(world.keys.states))) == 1


def test_a_large_group_travels_by_reference_and_its_object_goes_once_settled(world: World) -> None:
    from spotgrpo.shared.manifest import sha256_hex
    from spotgrpo.shared.wire import GroupRef, encode_group, encode_group_ref

    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()
    keys: list[str] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        body = encode_group(answer(task, worker.serving()))
        key = world.keys.group(task.task_id, sha256_hex(body))
        keys.append(key)
        world.store.create(key, body)
        ref = encode_group_ref(GroupRef(RUN, task.task_id, key, sha256_hex(body), len(body)))
        headers: dict[str, str | int] = {"run": RUN, "task": str(task.task_id), "kind": "group_ref"}
        publisher.publish(world.queues.rollouts, Message(ref, "m", headers)).result(5)
        return []

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=4)).run()
    expect_sound_books(world, steps=4)
    assert keys
    assert not list(world.store.list(f"{RUN}/groups/"))
