"""The [loss] table: what a preset stands for, what wins over it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.loading import load_config
from spotgrpo.shared.loss_config import PRESETS, LossConfig

TOML = """
[run]
id = "r1"
[broker]
url = "amqp://broker"
[bucket]
url = "s3://bucket/prefix"
[model]
name = "org/model"
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:exact"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return path


def refusal(toml: Path, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(toml, sets, environ={})
    return str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_gives_its_parts(preset: str) -> None:
    found = LossConfig.model_validate({"preset": preset})
    for name, value in PRESETS[found.preset].items():
        assert getattr(found, name) == value
    assert (found.kl, found.entropy, found.overlong, found.clip_cap) == (0.0, 0.0, "keep", None)


def test_the_defaults_are_those_of_the_default_preset() -> None:
    """The README's table shows the fields' own defaults."""
    fields = LossConfig.model_fields
    for name, value in PRESETS[fields["preset"].default].items():
        assert fields[name].get_default(call_default_factory=True) == value


def test_a_part_that_is_set_wins_over_the_preset_wherever_it_is_set(toml: Path) -> None:
    toml.write_text(TOML + '[loss]\npreset = "gspo"\nclip_high = 0.1\n')
    loss = load_config(toml, ["loss.aggregate=token"], environ={}).loss
    assert (loss.ratio, loss.clip_low, loss.clip_high, loss.aggregate) == (
        "sequence",
        3e-4,
        0.1,
        "token",
    )
    environ = {"SPOTGRPO_LOSS__PRESET": "cispo"}
    loss = load_config(toml, ['loss.corrections=["mask"]'], environ=environ).loss
    assert (loss.clip, loss.clip_low, loss.clip_high) == ("weight", 1.0, 0.1)
    assert loss.corrections == ["mask"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["loss.preset=ppo"], "gspo"),
        (['loss.corrections=["tis"]'], "truncate"),
        (['loss.corrections=["mask", "mask"]'], "twice"),
        (["loss.ratio=group", "loss.anchor=proximal"], "loss.anchor = 'behaviour'"),
        (["loss.clip_cap=1.2"], "above 1 + loss.clip_high"),
        (["loss.clip_cap=3", "loss.preset=cispo"], "loss.clip = 'ratio'"),
        (["loss.kl=-1"], "loss.kl"),
        (["train.clip_low=0.2"], "loss.clip_low"),
        (["train.clip_high=0.2"], "loss.clip_high"),
        (["train.advantage_scale=none"], "loss.advantage_scale"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    toml: Path, sets: list[str], said: str
) -> None:
    assert said in refusal(toml, *sets)


def test_a_table_that_is_no_table_is_refused() -> None:
    with pytest.raises(ValidationError):
        LossConfig.model_validate("gspo")
