"""One evaluation, what it comes to, and which version is due, by table."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest

from spotgrpo.consumer.evaluation import (
    MOST_REFUSALS,
    Answer,
    EvalResult,
    Evaluation,
    Plan,
    judged,
    result_of,
)
from spotgrpo.consumer.evaluations import Evaluations, Places
from spotgrpo.consumer.held_out import HeldOutIssuer
from spotgrpo.consumer.limits import TARGET_BATCHES, Limits
from spotgrpo.shared.config import Config
from spotgrpo.shared.ids import PolicyVersion, held_out_task, version_on_line
from spotgrpo.shared.manifest import Evaluated, Latest, Serving
from spotgrpo.shared.metrics import MetricsWriter
from tests.tools.eval_world import eval_answer, evaluating, held_out_of
from tests.tools.loop_world import Prompts, config_of
from tests.unit.test_issuer import Outbox
from tests.unit.test_retention import LATEST

ASKED, OTHER = "a" * 64, "b" * 64


def serving(number: int, epoch: int = 1) -> Serving:
    return Serving(version=number, epoch=epoch, manifest=f"m{number}", sha256="0" * 64)


def answer(*rewards: float | None) -> Answer:
    return Answer(rewards, tuple({"r": reward} for reward in rewards), (4,) * len(rewards), 1)


def result(reward: float | None, scored: int = 10) -> EvalResult:
    return EvalResult(10, scored, scored, reward, 0.0, {}, 0, 1.0, 0.0)


def test_a_prompt_counts_once_whatever_its_completions_and_nones_are_left_out() -> None:
    found = result_of([answer(1.0, 0.0), answer(None, 1.0), answer(None, None)], prompts=4)
    assert (found.reward, found.answered, found.scored, found.unscored) == (0.75, 3, 2, 3)
    assert found.stderr == pytest.approx(math.sqrt(0.125 / 2))
    assert found.parts == {"r": 0.75}
    assert (found.mean_length, found.clipped_ratio) == (4.0, 0.5)
    assert not found.decides


@pytest.mark.parametrize(
    ("answers", "reward"), [([], None), ([answer(None)], None), ([answer(2.0)], 2.0)]
)
def test_too_few_prompts_have_no_standard_error(
    answers: list[Answer], reward: float | None
) -> None:
    found = result_of(answers, prompts=2)
    assert (found.reward, found.stderr) == (reward, None)
    assert not found.decides


def test_prompts_are_asked_as_there_are_places_and_end_answered_or_refused_for_good() -> None:
    evaluation = Evaluation(serving(3), 4)
    assert evaluation.ask(2) == [0, 1]
    assert evaluation.ask(2) == []
    evaluation.answered(0, answer(1.0))
    assert not evaluation.wants(0)
    assert evaluation.ask(2) == [2]
    evaluation.refused(1)
    assert evaluation.ask(2) == [3]
    evaluation.answered(2, answer(1.0))
    for left in reversed(range(MOST_REFUSALS - 1)):
        assert evaluation.ask(2) == [1], "after all others"
        evaluation.refused(1)
        evaluation.refused(1)  # a second letter of the same
        assert not evaluation.is_over, left
    assert evaluation.ask(2) == []
    assert evaluation.wants(1), "a late answer is as good as any"
    evaluation.answered(3, answer(0.0))
    assert evaluation.is_over
    assert (evaluation.result().answered, evaluation.result().prompts) == (3, 4)


def test_an_answer_to_a_prompt_that_waits_to_be_asked_again_ends_it() -> None:
    evaluation = Evaluation(serving(3), 1)
    evaluation.ask(1)
    evaluation.refused(0)
    evaluation.answered(0, answer(1.0))
    assert evaluation.is_over
    assert evaluation.ask(1) == []


def test_the_first_of_equal_rewards_is_the_best_and_later_ones_count_as_no_better() -> None:
    found: Evaluated | None = None
    for number, reward in enumerate([0.2, 0.5, 0.5, 0.4]):
        found = judged(found, ASKED, serving(number), result(reward))
    assert found is not None
    assert found.best is not None
    assert (found.best.version, found.best.manifest, found.since_best) == (1, "m1", 2)
    assert (found.last.version, found.reward) == (3, 0.4)


@pytest.mark.parametrize(("reward", "scored"), [(None, 0), (0.9, 8)])
def test_an_evaluation_of_too_few_prompts_decides_nothing(
    reward: float | None, scored: int
) -> None:
    before = judged(judged(None, ASKED, serving(0), result(0.5)), ASKED, serving(1), result(0.4))
    found = judged(before, ASKED, serving(2), result(reward, scored))
    assert (found.best, found.since_best, found.reward) == (before.best, 1, None)
    assert found.last.version == 2


def test_other_prompts_begin_anew() -> None:
    before = judged(None, ASKED, serving(0), result(0.9))
    found = judged(before, OTHER, serving(1), result(0.1))
    assert found.best is not None
    assert (found.best.version, found.since_best) == (1, 0)


@pytest.mark.parametrize(
    ("number", "takeovers", "last", "due"),
    [
        (0, {1: 0}, None, (1, 0)),
        (0, {1: 0}, (1, 0), None),
        (9, {1: 0}, (1, 0), None),
        (10, {1: 0}, (1, 0), (1, 10)),
        (14, {1: 0, 2: 14}, (1, 0), (1, 10)),
        (14, {1: 0, 2: 12, 3: 14}, (1, 10), None),
        (14, {1: 0, 2: 7, 3: 14}, (1, 0), (2, 10)),
        (14, {1: 0, 2: 7, 3: 14}, (1, 10), (2, 10)),  # given up, and made anew
        (12, {1: 0, 2: 12}, (1, 20), None),  # given up: counts as 12
        (25, {1: 0, 2: 25}, (1, 20), (1, 25)),  # the last
        (27, {1: 0, 2: 27}, (1, 20), (1, 25)),  # max_steps was lowered
    ],
)
def test_what_a_learner_that_takes_over_evaluates_first(
    number: int,
    takeovers: dict[int, int],
    last: tuple[int, int] | None,
    due: tuple[int, int] | None,
) -> None:
    evaluated = judged(None, ASKED, serving(last[1], last[0]), result(0.5)) if last else None
    found = Plan(every=10, max_steps=25).left_over(number, takeovers, evaluated, ASKED)
    assert found == (PolicyVersion(*due) if due else None)


def test_other_prompts_are_asked_whatever_was_evaluated() -> None:
    evaluated = judged(None, OTHER, serving(10), result(0.5))
    found = Plan(every=10, max_steps=25).left_over(14, {1: 0}, evaluated, ASKED)
    assert found == PolicyVersion(1, 10)


def test_the_version_of_a_number_is_that_of_the_line() -> None:
    takeovers = {1: 0, 2: 5, 3: 3}
    found = [version_on_line(number, takeovers).epoch for number in range(7)]
    assert found == [1, 1, 1, 1, 3, 3, 3]
    assert version_on_line(0, {4: 0}) == PolicyVersion(4, 0)


def test_answers_that_came_during_a_long_step_are_no_silence(tmp_path: Path) -> None:
    """The learner hears nothing while it steps: 100 s here, where 40 s of silence end an evaluation."""
    config, clock, outbox = evaluating(10, reissue_after_s=10.0), Clock(), Outbox()
    issuer = HeldOutIssuer(Prompts(), outbox, config, clock)  # type: ignore[arg-type]
    issuer.held_out = held_out = held_out_of(config)
    with closing(MetricsWriter(tmp_path / "metrics.jsonl")) as metrics:
        evaluations = Evaluations(
            held_out, issuer, Plan(10, 100), Places(2, 8), metrics, None, serving(0),
            resumed=False, reissue_after_s=10.0, clock=clock,
        )  # fmt: skip
        task = held_out.task(held_out_task(PolicyVersion(1, 0), 1), PolicyVersion(1, 0))
        for step in range(3):
            evaluations.look(lambda _: None, is_trained=False)
            assert evaluations.is_busy, step
            if step == 1:
                evaluations.answered(task.task_id, eval_answer(task, 1.0))
            clock.now += 100.0
        evaluations.look(lambda _: None, is_trained=False)
        assert not evaluations.is_busy, "nothing was heard for a whole step and more"
    assert evaluations.evaluated is not None
    assert {one.message_id for one in outbox.sent} == {
        str(held_out_task(PolicyVersion(1, 0), prompt)) for prompt in range(3)
    }


# ---- limits -------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(config: Config, latest: Latest = LATEST) -> tuple[Limits, Clock]:
    clock = Clock()
    return Limits(config, latest, clock), clock


def test_the_time_of_all_learners_counts() -> None:
    before = LATEST.model_copy(update={"wall_s": 40.0})
    found, clock = limits(config_of(max_wall_s=60.0), before)
    clock.now += 19.0
    assert (found.wall_s, found.reached(None)) == (59.0, "")
    clock.now += 1.0
    assert found.reached(None) == "train.max_wall_s = 60"


def test_no_limit_is_reached_where_none_is_set() -> None:
    found, clock = limits(config_of())
    clock.now += 1e9
    for _ in range(2 * TARGET_BATCHES):
        found.trained(1e9)
    assert found.reached(None) == ""
    assert not found.needs_wall_s


def test_without_evaluations_the_target_is_held_against_the_mean_of_the_last_batches() -> None:
    found, _ = limits(config_of(target_reward=0.5))
    for reward in [0.0] * TARGET_BATCHES + [None] + [1.0] * (TARGET_BATCHES // 2 - 1):
        found.trained(reward)
        assert found.reached(None) == ""
    found.trained(1.0)
    assert found.reached(None) == "train.target_reward = 0.5"
    found.trained(-100.0)
    assert found.reached(None) == "train.target_reward = 0.5", "a limit that was reached stays so"


def test_with_evaluations_only_they_reach_the_target() -> None:
    found, _ = limits(evaluating(1, target_reward=0.5))
    for _ in range(2 * TARGET_BATCHES):
        found.trained(1.0)
    below, above = (judged(None, ASKED, serving(0), result(reward)) for reward in (0.4, 0.5))
    assert found.reached(None) == found.reached(below) == ""
    assert found.reached(above) == "train.target_reward = 0.5"


def test_patience_counts_evaluations_since_the_best() -> None:
    found, _ = limits(evaluating(1, {"patience": 2}))
    evaluated: Evaluated | None = None
    said = []
    for number, reward in enumerate([0.2, 0.1, 0.3, 0.2, 0.2]):
        evaluated = judged(evaluated, ASKED, serving(number), result(reward))
        said.append(found.reached(evaluated))
    assert said == ["", "", "", "", "eval.patience = 2"]


@pytest.mark.parametrize(
    ("ended", "stays"), [("train.target_reward = 0.5", True), ("train.target_reward = 0.4", False)]
)
def test_a_run_that_met_the_same_target_before_is_finished(ended: str, stays: bool) -> None:
    latest = LATEST.model_copy(update={"ended": ended})
    found, _ = limits(config_of(target_reward=0.5), latest)
    assert bool(found.reached(None)) == stays
