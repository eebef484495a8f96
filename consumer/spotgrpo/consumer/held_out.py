"""The held-out prompts of a run, and the tasks that ask them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spotgrpo.consumer.issuer import Issuer, rollout_seeds
from spotgrpo.consumer.prompts import PromptSource
from spotgrpo.consumer.rows import canonical_json
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import FIRST_HELD_OUT, PolicyVersion, TaskId, held_out_prompt
from spotgrpo.shared.wire import Json, Sampling, Task

if TYPE_CHECKING:
    from spotgrpo.consumer.prompts import PromptRow
    from spotgrpo.shared.config import Config

EVAL_KEYS: Final[Mapping[str, str]] = {
    "data.path": "eval.path",
    "data.name": "eval.name",
    "data.split": "eval.split",
    "data.revision": "eval.revision",
    "data.reasoning_gym_options": "eval.reasoning_gym_options",
    "sampling.max_new_tokens": "eval.max_new_tokens",
}
"""Where ``[eval]`` says it, what is wrong with held-out rows is wrong with that."""


@dataclass(frozen=True)
class HeldOut:
    """What every evaluation of a run asks.

    Attributes:
        asked: the prompts, in the order of their numbers.
        sampling, group_size: how each is asked.
        seed: of the rollouts.
        asked_sha256: names all of it: two evaluations compare where it is the same.
    """

    run: str
    asked: tuple[PromptRow, ...]
    sampling: Sampling
    group_size: int
    seed: int
    asked_sha256: str

    @classmethod
    def of(cls, config: Config, asked: tuple[PromptRow, ...], rows_sha256: str) -> HeldOut:
        """``asked``, the first of the rows that ``rows_sha256`` names, with the sampling of ``[eval]``."""
        given, sampling = config.eval, config.sampling
        limit = given.max_new_tokens or sampling.max_new_tokens
        made_of: dict[str, Json] = {
            "rows": [rows_sha256, len(asked), config.data.shuffle],
            "seed": config.run.seed,
            "sampling": [given.temperature, given.group_size, limit],
            "stop": [[*sampling.stop], [*sampling.stop_token_ids]],
        }
        return cls(
            run=config.run.id,
            asked=asked,
            sampling=Sampling(
                max_new_tokens=limit,
                temperature=given.temperature,
                stop=tuple(sampling.stop),
                stop_token_ids=tuple(sampling.stop_token_ids),
            ),
            group_size=given.group_size,
            seed=config.run.seed,
            asked_sha256=hashlib.sha256(canonical_json(made_of)).hexdigest(),
        )

    def __len__(self) -> int:
        return len(self.asked)

    def task(self, task_id: TaskId, version: PolicyVersion) -> Task:
        """One prompt for ``version`` alone. Its seeds are the same for every version, so that only these differ."""
        prompt = held_out_prompt(task_id)
        row = self.asked[prompt]
        return Task(
            run=self.run,
            task_id=task_id,
            prompt_ids=row.prompt_ids,
            prompt=row.prompt,
            row=row.row,
            sampling=self.sampling,
            seeds=rollout_seeds(self.seed, TaskId(FIRST_HELD_OUT + prompt), self.group_size),
            min_version=version.number,
            pinned=version,
            kind="eval",
        )


class HeldOutIssuer(Issuer):
    """Publishes held-out tasks of one version at a time; they are in no ledger, whoever asks publishes them."""

    held_out: HeldOut
    epoch: int

    def task(self, task_id: TaskId, issued_at: int) -> Task:
        """See the base; the version is that of number ``issued_at`` and ``epoch``."""
        return self.held_out.task(task_id, PolicyVersion(self.epoch, issued_at))


def open_held_out(
    config: Config, tokenizer: Any, context: int, training: PromptSource
) -> HeldOut | None:
    """The held-out prompts of ``config``, every row looked at once; None where it evaluates nothing.

    Args:
        tokenizer: of ``transformers``.
        context: tokens that prompt and completion may have together.
        training: the prompts that are trained on.

    Raises:
        ConfigError: whatever is wrong with the rows, or they are those of training.
    """
    if config.held_out is None:
        return None
    limit = config.eval.max_new_tokens or config.sampling.max_new_tokens
    try:
        source = PromptSource.open(config.held_out, config.run.seed, tokenizer, context, limit)
    except ConfigError as exc:
        raise _of_eval(exc, config) from exc
    found = source.identity()
    if found.sha256 == training.identity().sha256:
        remedy = "holds the rows of training: give rows that training never sees"
        raise ConfigError("eval", found.source, remedy)
    count = min(config.eval.prompts, len(source))
    return HeldOut.of(config, tuple(source[index] for index in range(count)), found.sha256)


def _of_eval(error: ConfigError, config: Config) -> ConfigError:
    """``error`` with the key that a person would look for."""
    key = EVAL_KEYS.get(error.key, error.key)
    is_given = getattr(config.eval, key.partition(".")[2], None) not in (None, {})
    return ConfigError(
        key if is_given else error.key,
        error.value,
        f"of the held-out rows ([eval]): {error.remedy}",
    )
