"""``spotgrpo learner``: everything a person can get wrong is tried before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spotgrpo.cli.errors import exit_on_errors, stop_is_a_normal_end
from spotgrpo.cli.extras import require
from spotgrpo.cli.options import AsJson, ConfigPath, Sets, folder_of, load, print_json
from spotgrpo.shared.config import Config
from spotgrpo.shared.stopping import AT_ONCE_S, Stopping


def command(config: ConfigPath, sets: Sets = None, as_json: AsJson = False) -> None:
    """Train a run: begin it, resume it, or stand by while another learner leads it.

    Tries data and rewards first. Ctrl-C or SIGTERM stops after the step at hand; the same command resumes.
    """
    with exit_on_errors():
        loaded = load(config, sets, Config)
        require("learner")
        with Stopping().on_signals(AT_ONCE_S) as stopping, stop_is_a_normal_end(stopping):
            summary = _train(loaded, folder_of(config), stopping)
        if as_json:
            print_json(summary)


def _train(config: Config, folder: Path, stopping: Stopping) -> Mapping[str, object]:
    from spotgrpo.cli.inputs import open_inputs

    inputs = open_inputs(config, folder)
    rewards = inputs.rewards.identities()
    from spotgrpo.consumer.run import run_learner  # imports torch: not before the inputs are right

    return run_learner(config, inputs.prompts, inputs.tokenizer, rewards, stopping, inputs.held_out)
