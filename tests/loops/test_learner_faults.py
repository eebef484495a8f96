"""Faults that a learner must outlive, or end by in good order; one story a test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spotgrpo.consumer.audit import read_chain
from spotgrpo.consumer.loop import TrainingLoop
from spotgrpo.shared.errors import ConfigError, Fenced, StoreUnavailable
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.manifest import Latest, sha256_hex
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryPublisher
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Message
from spotgrpo.shared.wire import (
    Group,
    GroupRef,
    Task,
    VersionRun,
    encode_group,
    encode_group_ref,
)
from tests.tools.loop_world import (
    RUN,
    BookkeepingTrainer,
    Stats,
    ThreadWorker,
    World,
    answer,
    config_of,
    flatten,
    group_message,
)


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[[MemoryStore], World]]:
    """Makes worlds on a bucket of the test's own."""
    made: list[World] = []

    def make(store: MemoryStore) -> World:
        made.append(World(tmp_path, store=store))
        return made[-1]

    yield make
    for world in made:
        world.close()


class Background:
    """A call on a thread, its result or error kept."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self.result = call()
        except BaseException as exc:  # noqa: BLE001 - looked at by the test
            self.error = exc

    def ends(self, seconds: float = 10.0) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until ``true()``."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def has_issued(world: World, tasks: int = 6) -> Callable[[], bool]:
    """True once so many tasks wait for workers."""
    return lambda: (
        world.queues.tasks in world.server.queues and world.ready(world.queues.tasks) == tasks
    )


class DownStore(MemoryStore):
    """A bucket that refuses to store some keys for a while."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.down, self._part = False, part

    def create(self, key: str, body: bytes) -> None:
        if self.down and self._part in key:
            raise StoreUnavailable("the bucket is down")
        super().create(key, body)


def test_a_stop_is_heard_during_a_broker_outage_and_tasks_do_not_pile_up(world: World) -> None:
    stopping = threading.Event()
    learner = Background(world.learner(config_of(reissue_after_s=0.05), stopping=stopping).run)
    until(has_issued(world))
    world.server.stop()
    time.sleep(1.5)
    assert sum(len(publisher._held) for publisher in world.server.publishers) <= 6
    stopping.set()
    assert learner.ends()


def test_rule_4_tasks_that_wait_for_a_worker_are_not_published_again(world: World) -> None:
    stopping = threading.Event()
    learner = Background(world.learner(config_of(reissue_after_s=0.1), stopping=stopping).run)
    until(has_issued(world))
    time.sleep(1.5)
    assert world.ready(world.queues.tasks) == 6
    stopping.set()
    assert learner.ends()


def test_a_publisher_that_is_refused_for_good_ends_the_learner(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: MemoryPublisher, _queue: str, _message: Message) -> Future[None]:
        refused: Future[None] = Future()
        refused.set_exception(ConfigError("broker.url", "x", "the user may not publish"))
        return refused

    monkeypatch.setattr(MemoryPublisher, "publish", refuse)
    with pytest.raises(ConfigError, match="may not publish"):
        world.learner(config_of()).run()


def test_a_version_that_met_an_outage_of_the_bucket_is_not_what_workers_forecast_by(
    worlds: Callable[[MemoryStore], World],
) -> None:
    """Told that versions lag so far behind their groups, a whole fleet would leave its tasks to one another."""
    leads: list[float] = []

    class SlowOnce(MemoryStore):
        def create(self, key: str, body: bytes) -> None:
            if "v00000003" in key and "manifest" in key:
                time.sleep(2.0)
            super().create(key, body)

        def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
            if key.endswith("latest.json"):
                leads.append(Latest.from_bytes(body).lead_s)
            return super().compare_and_swap(key, body, expected)

    world = worlds(SlowOnce())
    with ThreadWorker(world):
        world.learner(config_of(max_steps=6)).run()
    assert max(leads) < 2.0


def test_rule_7_a_deposed_learner_ends_though_it_cannot_get_the_leader_queue_back(
    world: World,
) -> None:
    """And it leaves the new one's dead letters alone: its own books do not know their tasks."""
    learner = Background(world.learner(config_of()).run)
    until(has_issued(world))
    time.sleep(0.3)
    other = MemoryBroker(world.server, RUN).leader_consumer(14)
    with world.server.changed:
        world.server._lose_channels()
        world.server.leaders[world.queues.leader] = other
    world.server.work()
    stored = world.store.get(world.keys.latest)
    theirs = world.latest().model_copy(update={"epoch": 2, "writer": "B", "nonce": "f" * 32})
    assert world.store.compare_and_swap(world.keys.latest, theirs.to_bytes(), stored.etag)
    publisher = MemoryBroker(world.server, RUN).publisher()
    letter = Message(b"x", "m", {"task": str(TaskId(50))})
    publisher.publish(world.queues.dead, letter).result(5)
    assert learner.ends()
    assert isinstance(learner.error, Fenced)
    assert world.ready(world.queues.dead) == 1


def test_rule_7_a_takeover_reads_again_when_the_dead_learners_last_move_lands_late(
    worlds: Callable[[MemoryStore], World],
) -> None:
    class Late(MemoryStore):
        late: bytes | None = None

        def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
            if self.late is not None and key.endswith("latest.json"):
                late, self.late = self.late, None
                super().compare_and_swap(key, late, expected)
            return super().compare_and_swap(key, body, expected)

    store = Late()
    world = worlds(store)
    with ThreadWorker(world):
        world.learner(config_of(max_steps=2)).run()
        store.late = world.latest().model_copy(update={"nonce": "e" * 32}).to_bytes()
        world.learner(config_of(max_steps=4)).run()
    assert world.audit().balanced
    assert len(world.durable_steps()) == 4


def test_latest_json_says_from_where_takeovers_resumed(world: World) -> None:
    with ThreadWorker(world):
        for max_steps in (2, 3, 5):
            world.learner(config_of(max_steps=max_steps)).run()
    assert world.latest().takeovers == {2: 2, 3: 3}


def test_lost_channels_do_not_make_steps_short(world: World) -> None:
    """Receipts of dead channels fill no prefetch window."""
    gate = threading.Event()

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        if task.task_id.index == 3:
            gate.wait(20)
        return [answer(task, worker.serving())]

    trainer = BookkeepingTrainer()
    config = config_of(max_steps=1, groups_per_step=4, max_staleness=0)
    with ThreadWorker(world, act):
        learner = Background(world.learner(config, trainer).run)
        rollouts = world.queues.rollouts
        mine = lambda: [c for c in world.server.consumers if c._source == rollouts]  # noqa: E731
        until(lambda: any(len(consumer._unsettled) == 3 for consumer in mine()))
        for _ in range(4):
            time.sleep(0.4)
            with world.server.changed:
                for consumer in mine():
                    consumer.lose_channel()
            world.server.work()
        gate.set()
        assert learner.ends()
    assert [len(step) for step in trainer.steps] == [4]


def test_an_error_ends_the_learner_though_the_bucket_is_down(
    worlds: Callable[[MemoryStore], World],
) -> None:
    store = DownStore()
    world = worlds(store)

    def fail() -> None:
        store.down = len(trainer.steps) == 1
        if len(trainer.steps) == 2:
            store.down = True
            raise RuntimeError("out of memory")

    trainer = BookkeepingTrainer(fail)
    with ThreadWorker(world):
        learner = Background(world.learner(config_of(), trainer).run)
        until(lambda: len(trainer.steps) == 2)
        store.down = True
        stopped = learner.ends(3)
        if not stopped:  # it waits for the commit before the failing step
            store.down = False
        assert learner.ends()
    assert isinstance(learner.error, RuntimeError)


@pytest.mark.parametrize("max_steps", [2, 100])
def test_a_stop_is_heard_while_the_bucket_takes_no_commit(
    worlds: Callable[[MemoryStore], World], monkeypatch: pytest.MonkeyPatch, max_steps: int
) -> None:
    """In mid-run, one version ahead of the bucket, and with the last version in flight."""
    monkeypatch.setattr("spotgrpo.consumer.loop.LAST_COMMIT_S", 0.5)
    store, stopping = DownStore(), threading.Event()
    world = worlds(store)

    def cut() -> None:
        store.down = len(trainer.steps) >= 1

    trainer = BookkeepingTrainer(cut)
    config = config_of(max_steps=max_steps)
    with ThreadWorker(world):
        learner = Background(world.learner(config, trainer, stopping).run)
        until(lambda: store.down and len(trainer.steps) >= 2)
        time.sleep(1.0)
        assert len(trainer.steps) <= 3, (
            "it may be one version ahead of the commit in flight, not more"
        )
        stopping.set()
        assert learner.ends()
        assert learner.error is None
        store.down = False
        world.learner(config_of(max_steps=4)).run()
    assert world.audit().balanced
    assert len(world.durable_steps()) == 4


def test_a_step_that_was_given_up_is_not_settled_by_a_commit_that_lands_after_all(
    worlds: Callable[[MemoryStore], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket comes back in the moment in which a learner that was told to stop has waited long enough."""
    monkeypatch.setattr("spotgrpo.consumer.loop.LAST_COMMIT_S", 0.5)
    store, stopping = DownStore(), threading.Event()
    world = worlds(store)
    plain = TrainingLoop._finish

    def finish(loop: TrainingLoop) -> None:
        store.down = False
        until(lambda: loop.committer.idle, 30.0)
        plain(loop)

    def cut() -> None:
        store.down = len(trainer.steps) >= 1

    monkeypatch.setattr(TrainingLoop, "_finish", finish)
    trainer = BookkeepingTrainer(cut)
    with ThreadWorker(world):
        learner = Background(world.learner(config_of(max_steps=100), trainer, stopping).run)
        until(lambda: len(trainer.steps) == 2)
        time.sleep(0.5)
        stopping.set()
        assert learner.ends(40)
    trained = [
        str(task)
        for ledger in read_chain(store, world.latest())
        for task in ledger.settled.get("trained", ())
    ]
    assert trained == flatten(world.durable_steps())


def test_a_stop_is_heard_while_a_dead_letter_cannot_be_stored(
    worlds: Callable[[MemoryStore], World],
) -> None:
    store = DownStore("/dead/")
    world, stopping = worlds(store), threading.Event()
    learner = Background(world.learner(config_of(), stopping=stopping).run)
    until(has_issued(world))
    store.down = True
    publisher = MemoryBroker(world.server, RUN).publisher()
    publisher.publish(world.queues.dead, Message(b"x", "m", {"task": str(TaskId(0))})).result(5)
    time.sleep(0.5)
    stopping.set()
    assert learner.ends()
    assert learner.error is None


def test_a_hiccup_in_the_last_commit_does_not_turn_a_stop_into_an_error(
    worlds: Callable[[MemoryStore], World],
) -> None:
    stopping = threading.Event()

    class Hiccup(MemoryStore):
        hiccups = 1

        def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
            if stopping.is_set() and self.hiccups:
                self.hiccups -= 1
                raise StoreUnavailable("503 SlowDown")
            return super().compare_and_swap(key, body, expected)

    world = worlds(Hiccup())
    trainer = BookkeepingTrainer(lambda: stopping.set() if len(trainer.steps) == 2 else None)
    with ThreadWorker(world):
        assert world.learner(config_of(), trainer, stopping).run()["ended"] == "stopped"
    assert world.latest().durable.version == 3


def test_a_polite_stop_makes_durable_what_was_trained(world: World) -> None:
    stopping = threading.Event()
    trainer = BookkeepingTrainer(lambda: stopping.set() if len(trainer.steps) == 2 else None)
    config = config_of(max_steps=40, durable_every=10, max_staleness=6)
    with ThreadWorker(world, prefetch=50):
        assert world.learner(config, trainer, stopping).run()["ended"] == "stopped"
    latest = world.latest()
    assert latest.durable.version == latest.serving.version == 3


def test_durable_every_holds_while_the_learner_waits_for_groups(
    worlds: Callable[[MemoryStore], World],
) -> None:
    class Counting(MemoryStore):
        states = 0

        def create(self, key: str, body: bytes) -> None:
            self.states += "/states/" in key
            super().create(key, body)

    store = Counting()
    world = worlds(store)

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        time.sleep(0.1)
        return [answer(task, worker.serving())]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=12, max_staleness=7, durable_every=4)).run()
    assert store.states <= 6
    assert len(world.durable_steps()) == 12


def test_a_bucket_that_refuses_deletes_costs_space_not_the_run(
    worlds: Callable[[MemoryStore], World],
) -> None:
    class NoDelete(MemoryStore):
        def delete(self, keys: Sequence[str]) -> None:
            if keys:
                raise ConfigError("bucket.access_key_id", "k", "the key may not delete")

    world = worlds(NoDelete())
    with ThreadWorker(world):
        assert world.learner(config_of(max_steps=4)).run()["ended"] == "done"


def test_a_lost_answer_to_the_first_write_of_run_json_is_settled(
    worlds: Callable[[MemoryStore], World],
) -> None:
    class Lost(MemoryStore):
        answers_lost = 1

        def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
            done = super().compare_and_swap(key, body, expected)
            if key.endswith("run.json") and self.answers_lost:
                self.answers_lost -= 1
                raise StoreUnavailable("the answer was lost")
            return done

    world = worlds(Lost())
    with ThreadWorker(world):
        assert world.learner(config_of(max_steps=2)).run()["ended"] == "done"


class LikeTheReal(BookkeepingTrainer):
    """Says that a step without trained tokens was skipped, as the real trainer does."""

    def step(self, groups: Sequence[Group]) -> Stats:
        if not any(rollout.loss_mask.any() for group in groups for rollout in group.rollouts):
            return Stats(tokens=0, skipped=True)
        return super().step(groups)


def test_a_group_without_trained_tokens_is_flat(world: World) -> None:
    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        group = answer(task, worker.serving())
        if task.task_id.index == 0:
            masked = [replace(one, loss_mask=np.zeros(2, np.bool_)) for one in group.rollouts]
            return [replace(group, rollouts=tuple(masked))]
        return [group]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=3, groups_per_step=1), LikeTheReal()).run()
    assert summary["groups_flat"] == 1


@pytest.mark.parametrize("version", [PolicyVersion(9, 1), PolicyVersion(1, 10**9)])
def test_a_group_of_a_version_that_was_never_served_is_not_trained(
    world: World, version: PolicyVersion
) -> None:
    """It would never be stale."""
    first: list[str] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        group = answer(task, worker.serving())
        if first:
            return [group]
        first.append(str(task.task_id))
        claims = [replace(one, versions=(VersionRun(version, 2),)) for one in group.rollouts]
        return [replace(group, rollouts=tuple(claims))]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=4)).run()
    assert first[0] not in flatten(world.durable_steps())


def test_the_object_of_a_late_duplicate_is_deleted(world: World) -> None:
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()
    seen: list[Task] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        seen.append(task)
        if task.min_version == 3 and seen[0] is not None and len(seen) < 100:
            body = encode_group(answer(seen[0], worker.serving(), "late"))
            key = world.keys.group(seen[0].task_id, sha256_hex(body))
            world.store.create(key, body)
            ref = encode_group_ref(GroupRef(RUN, seen[0].task_id, key, sha256_hex(body), len(body)))
            headers: dict[str, str | int] = {"task": str(seen[0].task_id), "kind": "group_ref"}
            publisher.publish(world.queues.rollouts, Message(ref, "m", headers)).result(5)
        return [answer(task, worker.serving())]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=8)).run()
    assert summary["groups_duplicate"]
    assert not list(world.store.list(f"{RUN}/groups/"))


def test_a_reference_to_another_object_is_dead_lettered_and_deletes_nothing(world: World) -> None:
    """A hostile worker must not get the learner to delete what it names."""
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()
    ref = GroupRef(RUN, TaskId(77), world.keys.latest, "a" * 64, 10)
    headers: dict[str, str | int] = {"task": str(TaskId(77)), "kind": "group_ref"}
    message = Message(encode_group_ref(ref), "m", headers)
    publisher.publish(world.queues.rollouts, message).result(5)
    with ThreadWorker(world):
        world.learner(config_of(max_steps=2)).run()
    assert world.latest().durable.version == 2


def test_states_that_nothing_names_are_deleted(world: World) -> None:
    with ThreadWorker(world):
        world.learner(config_of(max_steps=2)).run()
        left = world.keys.state(PolicyVersion(1, 99))
        world.store.create(left, b"of a learner that died before its move")
        world.learner(config_of(max_steps=4)).run()
    assert [info.key for info in world.store.list(world.keys.states)] == [
        world.latest().durable.state
    ]


def test_a_finished_run_issues_no_retries(world: World) -> None:
    """What goes stale in the last step is not asked for again."""
    late: list[Group] = []
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()

    class Last(BookkeepingTrainer):
        def step(self, groups: Sequence[Group]) -> Stats:
            stats = super().step(groups)
            if len(self.steps) == 3:
                publisher.publish(world.queues.rollouts, group_message(late[0])).result(5)
                time.sleep(0.3)
            return stats

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        group = answer(task, worker.serving())
        if task.task_id == TaskId(0):
            late.append(group)
            return []
        return [group]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=4), Last()).run()
    assert summary["groups_outstanding"] == 0
