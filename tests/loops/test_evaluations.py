"""Evaluations beside training: what is asked, what comes of it, and what faults cost. One story a test."""

from __future__ import annotations

import asyncio
import math
import statistics
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spotgrpo.consumer.evaluations import SILENT
from spotgrpo.consumer.export import best_version, export_version
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import PolicyVersion, TaskId, held_out_prompt, held_out_task
from spotgrpo.shared.memory.broker import MemoryBroker
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Message
from spotgrpo.shared.wire import Group, Sampling, Task, encode_task
from tests.loops.test_learner_faults import Background, until
from tests.loops.test_learner_loop import Killed, expect_sound_books
from tests.loops.test_worker_loop import Bench, working
from tests.loops.test_worker_loop import run as run_story
from tests.tools.eval_world import (
    PROMPTS,
    Clerk,
    eval_answer,
    evaluating,
    held_out_of,
    learner_of,
    records,
)
from tests.tools.loop_world import (
    RUN,
    BookkeepingTrainer,
    ThreadWorker,
    World,
    answer,
    config_of,
    group_message,
)
from tests.tools.scripted_engine import ScriptedEngine, scripted_token

GOOD = {0: 0.1, 2: 0.9, 4: 0.3, 6: 0.2}


def by_version(number: int, prompt: int) -> float:
    return GOOD[number] + 0.01 * prompt


def test_the_first_version_and_the_last_are_evaluated_and_the_run_waits_for_it(
    world: World,
) -> None:
    clerk, config = Clerk(by_version), evaluating(every=10, max_steps=2)
    with ThreadWorker(world, clerk):
        summary = learner_of(world, config).run()
    first, last = records(world)
    assert [first["eval_version"], last["eval_version"]] == [0, 2]
    rewards = [by_version(2, prompt) for prompt in range(PROMPTS)]
    assert last["eval_reward"] == pytest.approx(statistics.fmean(rewards))
    stderr = statistics.stdev(rewards) / math.sqrt(PROMPTS)
    assert last["eval_reward_stderr"] == pytest.approx(stderr)
    assert last["eval_rewards/r/mean"] == pytest.approx(last["eval_reward"])
    assert (last["eval_prompts"], last["eval_answered"], last["eval_decides"]) == (4, 4, True)
    latest = world.latest()
    assert (latest.finished, latest.ended) == (True, "train.max_steps = 2")
    assert latest.evaluated is not None
    assert latest.evaluated.best is not None
    assert latest.evaluated.best.policy == latest.evaluated.last.policy == PolicyVersion(1, 2)
    assert latest.evaluated.best.sha256 == latest.durable.manifest_sha256
    assert summary["best_version"] == str(PolicyVersion(1, 2))
    assert summary["ended_by"] == "train.max_steps = 2"
    expect_sound_books(world, steps=2)
    assert not world.ready(world.queues.rollouts)
    assert summary["groups_duplicate"] == summary["groups_outstanding"] == 0


def test_held_out_tasks_are_greedy_pinned_and_the_same_for_every_version(world: World) -> None:
    clerk, config = Clerk(by_version), evaluating(every=10, max_steps=2)
    with ThreadWorker(world, clerk):
        learner_of(world, config).run()
    assert clerk.prompts_asked(0) == clerk.prompts_asked(2) == list(range(PROMPTS))
    assert {task.sampling for task in clerk.asked} == {Sampling(4, temperature=0.0)}
    assert all(task.pinned and task.min_version == task.pinned.number for task in clerk.asked)
    assert all(task.group_size == 1 for task in clerk.asked)
    assert [task.seeds for task in clerk.asked[:PROMPTS]] == [
        task.seeds for task in clerk.asked[PROMPTS:]
    ]


def test_sampled_completions_of_a_prompt_are_one_observation(world: World) -> None:
    config = evaluating(10, {"group_size": 3, "temperature": 0.7, "prompts": 2}, max_steps=1)
    clerk = Clerk(lambda _, prompt: float(prompt))
    with ThreadWorker(world, clerk):
        learner_of(world, config).run()
    assert {task.group_size for task in clerk.asked} == {3}
    (_, last) = records(world)
    assert (last["eval_reward"], last["eval_prompts"]) == (0.5, 2)
    assert last["eval_reward_stderr"] == pytest.approx(math.sqrt(0.5) / math.sqrt(2))


def test_the_best_version_is_kept_and_exported_however_many_come_after_it(
    world: World, tmp_path: Path
) -> None:
    clerk = Clerk(by_version)
    with ThreadWorker(world, clerk):
        for steps in (2, 4, 6):
            config = evaluating(every=10, max_steps=steps, max_staleness=0)
            learner_of(world, config).run()
    evaluated = world.latest().evaluated
    assert evaluated is not None
    assert (evaluated.last.version, evaluated.since_best) == (6, 2)
    manifests = [info.key for info in world.store.list(world.keys.versions)]
    kept = {PolicyVersion.parse(key.split("/")[2]).number for key in manifests}
    assert kept == {2, 5, 6}
    version = best_version(world.store, world.keys)
    assert version == PolicyVersion(1, 2)
    out = tmp_path / "best"
    export_version(
        world.store, world.keys, version, out, merge=False, model_config=config_of().model
    )
    steps_of_best = world.durable_steps()[:2]
    assert (out / "adapter_model.safetensors").read_text() == str(steps_of_best).replace("'", '"')


def test_training_goes_on_while_a_version_is_evaluated_and_keeps_its_places(world: World) -> None:
    """Nobody answers what is held out until version 2 is served."""
    stash: list[Group] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        if task.kind == "train":
            held, number = [*stash], worker.serving().number
            if number < 2:
                return [answer(task, worker.serving())]
            stash.clear()
            return [*held, answer(task, worker.serving())]
        stash.append(eval_answer(task, 0.5))
        most.append(len(stash))
        if task.pinned == PolicyVersion(1, 0) and worker.serving().number < 2:
            return []
        return [stash.pop()]

    most: list[int] = []
    config = evaluating(10, {"prompts": 8}, max_steps=6)
    with ThreadWorker(world, act):
        summary = learner_of(world, config).run()
    assert summary["ended"] == "done"
    assert max(most) == 3, "a quarter of the 12 completions that training has outstanding"
    assert [(one["eval_version"], one["eval_answered"]) for one in records(world)] == [
        (0, 8),
        (6, 8),
    ]
    steps = [one["time"] for one in records(world, "learner")]
    assert sum(at < records(world)[0]["time"] for at in steps) >= 2
    expect_sound_books(world, steps=6)


@pytest.mark.parametrize("fault", ["the worker is killed", "the task is lost"])
def test_a_held_out_task_that_got_no_answer_is_asked_again(world: World, fault: str) -> None:
    lost: list[Task] = []

    def lose_one(task: Task, group: Group) -> Sequence[Group]:
        if lost or fault != "the task is lost":
            return [group]
        lost.append(task)
        return []

    clerk = Clerk(by_version, lose_one)
    config = evaluating(every=10, max_steps=2, reissue_after_s=0.3)
    learner = Background(learner_of(world, config).run)
    until(lambda: world.queues.tasks in world.server.queues)
    doomed = MemoryBroker(world.server, RUN, may_declare=False)
    taken = doomed.consumer(world.queues.tasks, 100)
    until(lambda: world.ready(world.queues.tasks) == 0 and taken.take(0.05) is not None)
    doomed.close()
    with ThreadWorker(world, clerk):
        assert learner.ends(20)
    assert learner.error is None
    assert [one["eval_answered"] for one in records(world)] == [PROMPTS, PROMPTS]
    if lost:
        assert len(clerk.prompts_asked(0)) > PROMPTS
    expect_sound_books(world, steps=2)


def test_a_prompt_that_is_refused_is_asked_three_times_and_an_evaluation_without_it_decides_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()

    def refuse_one(task: Task, group: Group) -> Sequence[Group]:
        if held_out_prompt(task.task_id) != 1:
            return [group]
        letter = Message(encode_task(task), "m", {"task": str(task.task_id)})
        publisher.publish(world.queues.dead, letter).result(5)
        return []

    clerk, config = Clerk(by_version, refuse_one), evaluating(every=10, max_steps=2)
    with ThreadWorker(world, clerk):
        summary = learner_of(world, config).run()
    assert sorted(clerk.prompts_asked(0)) == [0, 1, 1, 1, 2, 3]
    assert [one["eval_answered"] for one in records(world)] == [3, 3]
    evaluated = world.latest().evaluated
    assert evaluated is not None
    assert (evaluated.reward, evaluated.best, evaluated.since_best) == (None, None, 0)
    assert "decides nothing: 3 of 4 prompts got a reward" in caplog.text
    assert (summary["groups_dead"], summary["groups_duplicate"]) == (0, 0)
    with pytest.raises(ConfigError, match="no evaluation"):
        best_version(world.store, world.keys)


def test_an_evaluation_that_nobody_answers_ends_in_a_bounded_time(world: World) -> None:
    after_s = 0.1
    clerk = Clerk(lambda *_: 1.0, lambda *_: [])
    config = evaluating(every=10, max_steps=1, reissue_after_s=after_s)
    with ThreadWorker(world, clerk):
        summary = learner_of(world, config).run()
    assert summary["ended"] == "done"
    first, last = records(world)
    assert last["eval_answered"] == 0
    assert last["eval_reward"] is None
    assert first["eval_runtime"] >= SILENT * after_s
    assert len(clerk.prompts_asked(0)) > PROMPTS


def test_groups_of_another_version_or_another_kind_do_not_count(world: World) -> None:
    def twist(task: Task, group: Group) -> Sequence[Group]:
        if task in seen:
            return [group]
        seen.append(task)
        wrong = replace(group, kind="train")
        if held_out_prompt(task.task_id) == 0:
            wrong = replace(answer(task, PolicyVersion(1, 1)), kind="eval")
        return [wrong]

    seen: list[Task] = []
    clerk, config = Clerk(lambda *_: 1.0, twist), evaluating(every=3, max_steps=3)
    with ThreadWorker(world, clerk):
        learner_of(world, config).run()
    assert [one["eval_answered"] for one in records(world)] == [PROMPTS, PROMPTS]
    assert records(world, "learner")[-1]["groups_malformed"] > 0


def test_every_answer_that_comes_twice_counts_once(world: World) -> None:
    clerk = Clerk(lambda _, prompt: float(prompt), lambda _, group: [group, group])
    config = evaluating(every=10, max_steps=2)
    with ThreadWorker(world, clerk):
        summary = learner_of(world, config).run()
    assert [one["eval_reward"] for one in records(world)] == [1.5, 1.5]
    assert summary["groups_duplicate"] == 0
    until(lambda: not world.ready(world.queues.rollouts))


def test_a_takeover_in_the_middle_of_an_evaluation_loses_and_doubles_nothing(world: World) -> None:
    """Of version 0 two prompts are answered to the first learner; it is killed, and the next asks all again."""
    first = threading.Event()

    def half(task: Task, group: Group) -> Sequence[Group]:
        is_kept = first.is_set() or held_out_prompt(task.task_id) < 2
        return [group] if is_kept else []

    steps = iter(range(100))

    def die() -> None:
        if next(steps) == 3:
            first.set()
            raise Killed

    clerk, config = Clerk(by_version, half), evaluating(every=10, max_steps=6)
    with ThreadWorker(world, clerk):
        with pytest.raises(Killed):
            learner_of(world, config, BookkeepingTrainer(die)).run()
        assert not records(world)
        learner_of(world, config).run()
    assert sorted(set(clerk.prompts_asked(0))) == list(range(PROMPTS))
    assert [(one["eval_version"], one["eval_answered"]) for one in records(world)] == [
        (0, 4),
        (6, 4),
    ]
    evaluated = world.latest().evaluated
    assert evaluated is not None
    assert evaluated.best is not None
    assert (evaluated.best.version, evaluated.since_best) == (6, 0)
    assert world.latest().epoch == 2
    expect_sound_books(world, steps=6)


def test_what_was_found_outlives_a_takeover_and_is_not_looked_for_again(world: World) -> None:
    steps = iter(range(100))

    def die() -> None:
        if next(steps) == 3:
            until(lambda: bool(records(world)))
            raise Killed

    clerk, config = Clerk(by_version), evaluating(every=10, max_steps=2)
    with ThreadWorker(world, clerk):
        learner_of(world, config).run()
        longer = evaluating(every=10, max_steps=6)
        with pytest.raises(Killed):
            learner_of(world, longer, BookkeepingTrainer(die)).run()
        learner_of(world, longer).run()
    assert [one["eval_version"] for one in records(world)] == [0, 2, 6]
    evaluated = world.latest().evaluated
    assert evaluated is not None
    assert evaluated.best is not None
    assert (evaluated.best.version, evaluated.since_best) == (2, 1)


def test_other_prompts_make_another_best(world: World) -> None:
    """The reward of version 2 on other prompts says nothing about these."""
    with ThreadWorker(world, Clerk(by_version)):
        learner_of(world, evaluating(every=10, max_steps=2)).run()
        learner_of(world, evaluating(10, {"prompts": 3}, max_steps=4)).run()
    evaluated = world.latest().evaluated
    assert evaluated is not None
    assert evaluated.best is not None
    assert (evaluated.best.version, evaluated.since_best) == (4, 0)
    assert [(one["eval_version"], one["eval_prompts"]) for one in records(world)] == [
        (0, 4), (2, 4), (0, 3), (4, 3),
    ]  # fmt: skip


def test_patience_ends_the_run_for_all_and_more_of_it_lets_it_go_on(world: World) -> None:
    clerk = Clerk(lambda *_: 0.5)
    with ThreadWorker(world, clerk):
        summary = learner_of(world, evaluating(1, {"patience": 2}, max_steps=60)).run()
        assert (summary["ended"], summary["ended_by"]) == ("done", "eval.patience = 2")
        latest = world.latest()
        assert latest.finished
        assert latest.evaluated is not None
        assert (latest.evaluated.since_best, latest.evaluated.best.version) == (2, 0)  # type: ignore[union-attr]
        again = learner_of(world, evaluating(1, {"patience": 2}, max_steps=60)).run()
        assert (again["ended_by"], again["versions_this_time"]) == ("eval.patience = 2", 0)
        assert world.latest().finished
        more = learner_of(world, evaluating(1, {"patience": 4}, max_steps=60)).run()
    assert more["ended_by"] == "eval.patience = 4"
    assert world.audit().balanced


def test_a_run_that_is_out_of_time_is_finished_whether_groups_come_or_not(world: World) -> None:
    config = config_of(max_steps=10_000, max_wall_s=0.4)
    with ThreadWorker(world):
        summary = world.learner(config).run()
    assert (summary["ended"], summary["ended_by"]) == ("done", "train.max_wall_s = 0.4")
    latest = world.latest()
    assert (latest.finished, latest.ended) == (True, "train.max_wall_s = 0.4")
    assert latest.wall_s >= 0.4
    assert world.audit().balanced
    assert world.learner(config).run()["versions_this_time"] == 0
    nobody = world.learner(config_of(max_steps=10_000, max_wall_s=latest.wall_s + 0.5)).run()
    assert str(nobody["ended_by"]).startswith("train.max_wall_s")
    assert world.audit().balanced


def test_the_time_of_a_learner_that_was_stopped_counts(world: World) -> None:
    stopping = threading.Event()
    config = config_of(max_wall_s=100.0)
    learner = Background(world.learner(config, stopping=stopping).run)
    until(lambda: world.queues.tasks in world.server.queues and world.ready(world.queues.tasks) > 0)
    stopping.wait(0.3)
    stopping.set()
    assert learner.ends()
    assert world.latest().wall_s >= 0.3
    assert not world.latest().finished


def test_an_evaluation_that_reaches_the_target_ends_the_run(world: World) -> None:
    clerk = Clerk(lambda number, _: 0.2 * number)
    config = evaluating(every=1, max_steps=60, target_reward=0.5)
    with ThreadWorker(world, clerk):
        summary = learner_of(world, config).run()
        assert summary["ended_by"] == "train.target_reward = 0.5"
        best = world.latest().evaluated.best  # type: ignore[union-attr]
        assert best is not None
        assert best.reward >= 0.5
        assert isinstance(summary["versions"], int)
        assert summary["versions"] < 60
        assert learner_of(world, config).run()["versions_this_time"] == 0
    assert world.audit().balanced


def test_without_evaluations_the_last_ten_batches_reach_the_target(world: World) -> None:
    """Every batch has the mean reward 0.5. A standby that takes the finished run over trains nothing more."""
    config = config_of(max_steps=60, target_reward=0.5)
    with ThreadWorker(world):
        summary = world.learner(config).run()
        assert (summary["ended_by"], summary["versions"]) == ("train.target_reward = 0.5", 10)
        assert world.latest().finished
        assert world.learner(config).run()["versions_this_time"] == 0
        assert world.latest().finished
        more = world.learner(config_of(max_steps=12, target_reward=0.6)).run()
    assert (more["ended_by"], more["versions"]) == ("train.max_steps = 12", 12)
    expect_sound_books(world, steps=12)


def test_a_run_without_evaluations_passes_over_what_one_before_it_left(world: World) -> None:
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher, version = broker.publisher(), PolicyVersion(1, 0)
    config = evaluating(every=10)
    task = held_out_of(config).task(held_out_task(version, 1), version)
    late = group_message(eval_answer(task, 1.0))
    letter = Message(encode_task(task), "m", {"task": str(task.task_id)})
    publisher.publish(world.queues.rollouts, late).result(5)
    publisher.publish(world.queues.dead, letter).result(5)
    with ThreadWorker(world):
        summary = world.learner(config_of(max_steps=3)).run()
    assert (summary["groups_duplicate"], summary["groups_dead"]) == (0, 0)
    assert not world.ready(world.queues.dead)
    assert not list(world.store.list(world.keys.dead_letters))
    assert not records(world)
    assert not any(key.startswith("eval") for key in records(world, "learner")[-1])
    expect_sound_books(world, steps=3)


def test_a_run_that_was_begun_without_evaluations_cannot_have_them_later(world: World) -> None:
    with ThreadWorker(world):
        world.learner(config_of(max_steps=1)).run()
    with pytest.raises(ConfigError, match=r"eval\.every = 5: run loop was begun without"):
        learner_of(world, evaluating(every=5, max_steps=2)).run()


def test_a_worker_samples_greedily_the_version_that_is_evaluated_while_newer_ones_come(
    tmp_path: Path,
) -> None:
    """A real worker on a scripted engine. Rewards are what anybody can work out from its tokens."""
    bench = Bench(tmp_path, store=MemoryStore())
    rewards = "def letters(completions, **_):\n    return [sum(map(ord, one)) / 100 for one in completions]\n"
    (tmp_path / "rewards.py").write_text(rewards.replace("letters", "length"))
    config = evaluating(4, {"prompts": 8}, max_steps=8)

    async def story() -> None:
        learner = Background(learner_of(bench, config).run)
        engine = ScriptedEngine(token_s=0.002, max_versions=5)
        await asyncio.to_thread(until, lambda: bench.queues.rollouts in bench.server.queues)
        async with working(bench, engine, evaluates=True):
            await asyncio.to_thread(learner.ends, 30)
        assert learner.error is None

    run_story(story)
    bench.close()
    held_out, found = held_out_of(config), records(bench)
    assert found[0]["eval_version"] == 0
    assert found[-1]["eval_version"] == 8
    for one in found:
        version = PolicyVersion(1, one["eval_version"])
        rewards_of = []
        for prompt in range(8):
            (seed,) = held_out.task(held_out_task(version, prompt), version).seeds
            ids = [scripted_token(seed, version, at)[0] for at in range(4)]
            rewards_of.append(sum(96 + token % 26 for token in ids) / 100)
        assert one["eval_answered"] == 8
        assert one["eval_reward"] == pytest.approx(statistics.fmean(rewards_of))
    report = bench.audit()
    assert report.balanced
    assert report.version == 8
    assert TaskId(0) not in {TaskId.parse(task) for task in report.lost}
