"""One evaluation: which held-out prompts were asked and answered, and what that comes to. No I/O, no clock."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spotgrpo.shared.ids import PolicyVersion, lineage_version, version_on_line
from spotgrpo.shared.manifest import BestVersion, Evaluated, NamedVersion, Serving

if TYPE_CHECKING:
    from spotgrpo.shared.wire import Group, Rollout

MOST_REFUSALS: Final = 3
"""A prompt that was refused as often is not asked any more."""
DECIDES: Final = 0.9
"""An evaluation with rewards for less than this share of its prompts decides nothing: it is of other prompts."""


@dataclass(frozen=True)
class Answer:
    """What came back for one held-out prompt; a reward is None where nobody could give one."""

    rewards: tuple[float | None, ...]
    parts: tuple[Mapping[str, float | None], ...]
    lengths: tuple[int, ...]
    truncated: int

    @classmethod
    def of(cls, group: Group) -> Answer:
        rollouts: Sequence[Rollout] = group.rollouts
        return cls(
            tuple(one.reward for one in rollouts),
            tuple(one.reward_parts for one in rollouts),
            tuple(len(one.token_ids) for one in rollouts),
            sum(one.truncated for one in rollouts),
        )


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found.

    Attributes:
        prompts: that were to be asked; ``answered`` of them were, ``scored`` of these have a reward.
        reward: mean over prompts of the mean over their completions.
        stderr: its standard error: sample standard deviation of the prompts' means / √prompts. Prompts are independent,
            the completions of one are not (Miller 2024, arXiv:2411.00640). None with fewer than two prompts.
        parts: each reward function's mean, made in the same way.
        unscored: completions without a reward.
        mean_length: tokens of a completion.
        clipped_ratio: share of completions that the token limit cut.
    """

    prompts: int
    answered: int
    scored: int
    reward: float | None
    stderr: float | None
    parts: Mapping[str, float | None]
    unscored: int
    mean_length: float | None
    clipped_ratio: float | None

    @property
    def decides(self) -> bool:
        """Whether it can be held against others: of the same prompts, but for a few."""
        return self.reward is not None and self.scored >= DECIDES * self.prompts


def result_of(answers: Collection[Answer], prompts: int) -> EvalResult:
    """What ``answers``, of ``prompts`` prompts, come to."""
    means = _means(answer.rewards for answer in answers)
    names = sorted({name for answer in answers for parts in answer.parts for name in parts})
    parts = {
        name: _mean(_means([one.get(name) for one in answer.parts] for answer in answers))
        for name in names
    }
    lengths = [length for answer in answers for length in answer.lengths]
    return EvalResult(
        prompts=prompts,
        answered=len(answers),
        scored=len(means),
        reward=_mean(means),
        stderr=statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else None,
        parts=parts,
        unscored=sum(reward is None for answer in answers for reward in answer.rewards),
        mean_length=_mean(lengths),
        clipped_ratio=sum(one.truncated for one in answers) / len(lengths) if lengths else None,
    )


def _means(values: Iterable[Iterable[float | None]]) -> list[float]:
    """The mean of each prompt's numbers; prompts without any are left out."""
    numbers = ([value for value in one if value is not None] for one in values)
    return [statistics.fmean(one) for one in numbers if one]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass
class Evaluation:
    """The evaluation of one version, from the first task to the last answer.

    Every prompt waits to be asked, is asked, or has ended: answered, or refused for good.
    """

    serving: Serving
    prompts: int
    _waiting: deque[int] = field(default_factory=deque)
    _asked: dict[int, None] = field(default_factory=dict)
    _answers: dict[int, Answer] = field(default_factory=dict)
    _refusals: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._waiting.extend(range(self.prompts))

    @property
    def is_over(self) -> bool:
        return not self._waiting and not self._asked

    @property
    def asked(self) -> tuple[int, ...]:
        """Prompts that wait for their answer."""
        return tuple(self._asked)

    def ask(self, places: int) -> list[int]:
        """The prompts to ask now, so that at most ``places`` are with workers at a time."""
        chosen = []
        while self._waiting and len(self._asked) < places:
            prompt = self._waiting.popleft()
            self._asked[prompt] = None
            chosen.append(prompt)
        return chosen

    def wants(self, prompt: int) -> bool:
        """Whether an answer to it is still missing; one that comes late, or after a refusal, is as good as any."""
        return prompt < self.prompts and prompt not in self._answers

    def answered(self, prompt: int, answer: Answer) -> None:
        self._answers[prompt] = answer
        self._asked.pop(prompt, None)
        if self._refusals[prompt] and prompt in self._waiting:
            self._waiting.remove(prompt)

    def refused(self, prompt: int) -> None:
        """Ask it again once all others were asked, a few times."""
        if prompt not in self._asked:
            return
        del self._asked[prompt]
        self._refusals[prompt] += 1
        if self._refusals[prompt] < MOST_REFUSALS:
            self._waiting.append(prompt)

    def result(self) -> EvalResult:
        """What the answers that are in come to."""
        return result_of(self._answers.values(), self.prompts)


def judged(
    before: Evaluated | None, asked_sha256: str, serving: Serving, result: EvalResult
) -> Evaluated:
    """``before`` and one evaluation more. What was asked otherwise is forgotten: its rewards do not compare."""
    last = NamedVersion(version=serving.version, epoch=serving.epoch)
    best, since_best = None, 0
    if before is not None and before.asked_sha256 == asked_sha256:
        best, since_best = before.best, before.since_best
    if result.reward is None or not result.decides:
        return Evaluated(
            asked_sha256=asked_sha256, last=last, reward=None, best=best, since_best=since_best
        )
    if best is None or result.reward > best.reward:
        best, since_best = BestVersion(**serving.model_dump(), reward=result.reward), 0
    else:
        since_best += 1
    return Evaluated(
        asked_sha256=asked_sha256,
        last=last,
        reward=result.reward,
        best=best,
        since_best=since_best,
    )


@dataclass(frozen=True)
class Plan:
    """Which versions are evaluated: every n-th from 0 on, and the one that ``max_steps`` ends with."""

    every: int
    max_steps: int

    def is_due(self, number: int) -> bool:
        return number % self.every == 0 or number == self.max_steps

    def left_over(
        self,
        number: int,
        takeovers: Mapping[int, int],
        evaluated: Evaluated | None,
        asked_sha256: str,
    ) -> PolicyVersion | None:
        """What a learner that resumes from version ``number`` has to evaluate first, if anything.

        The newest that is due and on the line of versions, unless it, or a newer one, was evaluated.
        """
        due = max(one for one in (number - number % self.every, self.max_steps) if one <= number)
        done = -1
        if evaluated is not None and evaluated.asked_sha256 == asked_sha256:
            done = lineage_version(evaluated.last.policy, takeovers)
        return version_on_line(due, takeovers) if due > done else None
