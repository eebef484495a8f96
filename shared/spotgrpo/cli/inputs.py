"""What a person hands in: model, data and rewards, opened and tried before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotgrpo.cli.checks import Check
from spotgrpo.cli.extras import missing
from spotgrpo.shared.config import Config, ModelConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.fingerprint import CONFIG, model_folder, read_json

if TYPE_CHECKING:
    from spotgrpo.consumer.held_out import HeldOut
    from spotgrpo.consumer.prompts import PromptRow, PromptSource
    from spotgrpo.producer.rewards import Rewards

UNCHECKED: Final = "needs the learner's packages: pip install 'spotgrpo[learner]'"

RIGHT_MODEL: Final = "give a folder with a transformers model, or a hub name"


@dataclass(frozen=True)
class Inputs:
    """A run's inputs, found to work together."""

    tokenizer: Any
    prompts: PromptSource
    rewards: Rewards
    held_out: HeldOut | None


def open_inputs(config: Config, folder: Path) -> Inputs:
    """Open tokenizer, data and rewards, and try the rewards on the first prompt.

    Args:
        config: the run's.
        folder: where relative reward files are looked for.

    Raises:
        ConfigError: whatever is wrong with one of them.
    """
    rewards = open_rewards(config, folder)
    tokenizer, prompts = open_prompts(config)
    try_rewards(rewards, prompts[0], config.worker.reward_timeout_s)
    held_out = open_held_out(config, tokenizer, prompts)
    if held_out is not None:
        try_rewards(rewards, held_out.asked[0], config.worker.reward_timeout_s)
    return Inputs(tokenizer, prompts, rewards, held_out)


def open_prompts(config: Config) -> tuple[Any, PromptSource]:
    """Tokenizer and prompts, every row looked at once. Raises ConfigError."""
    from spotgrpo.consumer.prompts import PromptSource
    from spotgrpo.shared.tokenizing import load_tokenizer

    context = context_of(config.model)
    tokenizer = load_tokenizer(config.model)
    prompts = PromptSource.open(
        config.data, config.run.seed, tokenizer, context, config.sampling.max_new_tokens
    )
    return tokenizer, prompts


def open_held_out(config: Config, tokenizer: Any, prompts: PromptSource) -> HeldOut | None:
    """The held-out prompts, every row looked at once; None where nothing is evaluated. Raises ConfigError."""
    from spotgrpo.consumer.held_out import open_held_out

    return open_held_out(config, tokenizer, context_of(config.model), prompts)


def open_rewards(config: Config, folder: Path) -> Rewards:
    """The reward functions, imported. Raises ConfigError."""
    from spotgrpo.producer.rewards import Rewards

    return Rewards.resolve(config.rewards, folder)


def try_rewards(rewards: Rewards, first: PromptRow, timeout_s: float) -> None:
    """Call every reward function on one prompt. Raises ConfigError where one does not fit."""
    rewards.try_once(first.prompt, first.row, timeout_s)


def context_of(config: ModelConfig) -> int:
    """Longest prompt plus completion in tokens, from the model's ``config.json``; loads no weights.

    Raises:
        ConfigError: no such model, or ``model.max_context`` is more than it has, or neither says.
    """
    found = model_settings(config)
    own = (found.get("text_config") or found).get("max_position_embeddings")
    if config.max_context is None and own is None:
        remedy = "this model does not say its context length: set it"
        raise ConfigError("model.max_context", None, remedy)
    if config.max_context is not None and own is not None and config.max_context > own:
        remedy = f"this model has {own} positions: use at most that"
        raise ConfigError("model.max_context", config.max_context, remedy)
    return config.max_context or int(str(own))


def model_settings(config: ModelConfig) -> dict[str, Any]:
    """The model's ``config.json``. Raises ConfigError."""
    try:
        folder = model_folder(config.name, config.revision, (CONFIG,))
    except ConfigError as exc:
        raise ConfigError("model.name", config.name, f"{exc.remedy}; {RIGHT_MODEL}") from exc
    found = read_json(folder / CONFIG, config.name)
    if "model_type" not in found:
        what = f"{folder} has no config.json that names a model_type"
        raise ConfigError("model.name", config.name, f"{what}; {RIGHT_MODEL}")
    return found


# ---- as checks of the doctor ----------------------------------------------------------------------------------


class InputChecks:
    """The checks of one configuration's inputs; the data set is opened once for all of them."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._folder = config, folder

    @cached_property
    def _opened(self) -> tuple[Any, PromptSource]:
        return open_prompts(self._config)

    @property
    def _prompts(self) -> PromptSource:
        return self._opened[1]

    @cached_property
    def _held_out(self) -> HeldOut | None:
        return open_held_out(self._config, *self._opened)

    def check_model(self) -> Check:
        """Whether the model is there, what it is, and its context."""
        model = self._config.model
        if not Path(model.name).is_dir() and missing("worker"):
            return Check("model", "warn", f"{model.name} was not looked at", UNCHECKED)
        kind = model_settings(model)["model_type"]
        return Check("model", "ok", f"{model.name}: {kind}, context {context_of(model)} tokens")

    def check_data(self) -> Check:
        """Whether every prompt of the data set can be asked."""
        if missing("learner"):
            return Check("data", "warn", "was not looked at", UNCHECKED)
        tokens = len(self._prompts[0].prompt_ids)
        return Check("data", "ok", f"{len(self._prompts)} prompts; the first has {tokens} tokens")

    def check_held_out(self) -> list[Check]:
        """Whether every held-out prompt can be asked; nothing where none is."""
        if self._config.held_out is None or missing("learner"):
            return []
        try:
            _ = self._opened
        except ConfigError:
            return [Check("eval", "warn", "was not looked at", "mend model and data first")]
        held_out = self._held_out
        count = len(held_out) if held_out is not None else 0
        detail = f"{count} held-out prompts, every {self._config.eval.every} versions"
        return [Check("eval", "ok", detail)]

    def check_rewards(self) -> Check:
        """Whether every reward function imports, and scores the first prompt where the data can be opened."""
        rewards = open_rewards(self._config, self._folder)
        names = ", ".join(reward.function for reward in self._config.rewards)
        if missing("learner"):
            return Check("rewards", "warn", f"{names}: imported, not tried", UNCHECKED)
        try:
            prompts = self._prompts
        except ConfigError:
            remedy = "mend model and data first"
            return Check("rewards", "warn", f"{names}: imported, not tried", remedy)
        timeout_s = self._config.worker.reward_timeout_s
        try_rewards(rewards, prompts[0], timeout_s)
        try:
            held_out = self._held_out
        except ConfigError:
            held_out = None  # its own check says so
        if held_out is not None:
            try_rewards(rewards, held_out.asked[0], timeout_s)
        return Check("rewards", "ok", f"{names}: tried on the first prompt")
