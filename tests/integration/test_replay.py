"""Steps of the real trainer that are not finite: a run is ended by them, and a replay says where they are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file  # noqa: E402

from spotgrpo.consumer.losses.objective import Objective  # noqa: E402
from spotgrpo.consumer.replay import Replayed, replay  # noqa: E402
from spotgrpo.consumer.replays import check_sets, fetch, list_kept, settings_of  # noqa: E402
from spotgrpo.consumer.trainer import Trainer  # noqa: E402
from spotgrpo.shared.config import Config  # noqa: E402
from spotgrpo.shared.errors import ConfigError, IntegrityError, SpotGRPOError  # noqa: E402
from spotgrpo.shared.fingerprint import base_fingerprint  # noqa: E402
from spotgrpo.shared.manifest import LoraIdentity, Probe  # noqa: E402
from spotgrpo.shared.memory.store import MemoryStore  # noqa: E402
from spotgrpo.shared.ports import ObjectStore  # noqa: E402
from spotgrpo.shared.wire import Group, Task  # noqa: E402
from tests.integration.test_trainer import one_thread  # noqa: E402
from tests.tools.loop_world import ThreadWorker, World, answer, config_of, document_of  # noqa: E402
from tests.tools.tiny_model import build_tiny_model  # noqa: E402

__all__ = ["one_thread"]
pytestmark = pytest.mark.engine

SPOILT = 77
"""A token id that spoils what comes after it; the trainer's own trials at its start do not have it."""
LAST = "v{:08d}.e0001.3"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("replay") / "model")


def run_config(model: Path, loss: dict[str, Any] | None = None, **train: Any) -> Config:
    options = {"threads": 1, "device": "cpu", "max_steps": 4, **train}
    given = config_of(**options).model_dump(exclude={"eval"})
    lora = {"rank": 4, "alpha": 8.0}
    return Config.model_validate(
        {**given, "model": {"name": str(model)}, "lora": lora, "loss": loss or {}}
    )


class Unprobed(Trainer):
    """Its versions are committed whatever they have become: a probe sees but a few tokens."""

    def probe(self) -> Probe:
        return Probe(token_ids=[1, 2], version_logprobs=[-1.0], base_logprobs=[-1.0])


def trainer_of(config: Config, kind: type[Trainer] = Unprobed) -> Trainer:
    return kind(
        config.model,
        config.lora,
        config.train,
        config.sampling.temperature,
        config.run.seed,
        Objective.of(config),
    )


def vary(worker: ThreadWorker, task: Task, spoilt: int = 6) -> Sequence[Group]:
    """Rollouts that differ; the second token of the second is ``spoilt``."""
    group = answer(task, worker.serving(), tokens=4)
    ids = np.array([7, spoilt, 8, 9], dtype=np.int32)
    second = replace(group.rollouts[1], token_ids=ids)
    return [replace(group, rollouts=(group.rollouts[0], second))]


def run_into_the_ground(
    folder: Path,
    config: Config,
    act: Callable[[ThreadWorker, Task], Sequence[Group]] = vary,
    store: ObjectStore | None = None,
) -> World:
    """A run of the real trainer that three steps in a row end."""
    base = base_fingerprint(config.model.name)
    trainer = trainer_of(config)
    lora = LoraIdentity(rank=4, alpha=8.0, target_modules=trainer.target_modules)
    document = document_of(config, name=config.model.name, base=base)
    world = World(folder, store=store or MemoryStore())
    learner = world.learner(
        config,
        trainer,  # type: ignore[arg-type]
        document=document.model_copy(update={"lora": lora}),
    )
    try:
        with ThreadWorker(world, act), pytest.raises(SpotGRPOError, match="3 steps in a row"):
            learner.run()
    finally:
        world.close()
    return world


def contents(world: World) -> dict[str, bytes]:
    return {info.key: world.store.get(info.key).body for info in world.store.list("")}


def taken_again(world: World, config: Config, step: str, *sets: str) -> Replayed:
    """The step, which leaves the bucket as it is."""
    before = contents(world)
    recorded = fetch(world.store, world.keys, step)
    found = replay(recorded, settings_of(recorded.step, sets), config)
    assert contents(world) == before
    json.dumps(found.to_dict(), allow_nan=False)
    return found


def test_a_version_that_gives_no_finite_logprobs_is_not_committed_and_the_run_says_why(
    tiny: Path, tmp_path: Path
) -> None:
    config = run_config(tiny, learning_rate=1e25)
    trainer = trainer_of(config, Trainer)
    world = World(tmp_path)
    try:
        learner = world.learner(config, trainer)  # type: ignore[arg-type]
        with (
            ThreadWorker(world, vary),
            pytest.raises(SpotGRPOError, match="version 1 gives") as caught,
        ):
            learner.run()
    finally:
        world.close()
    assert "train.learning_rate" in str(caught.value)
    assert world.latest().serving.version == 0
    assert world.audit().balanced


@pytest.fixture(scope="module")
def grown(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Config]:
    """A learning rate that makes the first step overflow the second."""
    config = run_config(tiny, learning_rate=1e25)
    return run_into_the_ground(tmp_path_factory.mktemp("grown"), config), config


def test_weights_that_have_grown_are_found_out(grown: tuple[World, Config]) -> None:
    world, config = grown
    kept = list_kept(world.store, world.keys)
    assert [one.step for one in kept] == [f"v00000001.e0001.{n}" for n in (1, 2, 3)]
    assert {(one.version, one.loss, one.groups, one.workers) for one in kept} == {
        (1, "nan", 2, ("w",))
    }
    found = taken_again(world, config, kept[-1].step)
    recorded = fetch(world.store, world.keys, kept[-1].step)
    assert not found.is_finite
    assert found.changed == {}
    assert found.recorded[0] == "nan" == repr(found.loss)
    first = found.found.first
    assert first is not None
    assert (first.task, first.rollout, first.token) == (str(recorded.groups[0].task_id), 0, 0)
    assert {"logprob", "ratio", "loss"} <= set(first.odd)
    assert first.values["advantage"] == pytest.approx(-(0.5**0.5), rel=1e-3)
    assert found.found.odd_tokens == found.found.tokens == 16
    assert found.base_is_finite
    assert found.weights.greatest > 1e20
    assert found.cause is not None
    assert "train.learning_rate is far too large" in found.cause
    assert len(found.found.odd_gradients) == found.found.parameters


def test_a_gradient_that_overflows_is_blamed_on_its_parameters_and_another_setting_mends_it(
    tiny: Path, tmp_path: Path
) -> None:
    config = run_config(tiny, {"entropy": 1e36})
    world = run_into_the_ground(tmp_path, config)
    step = LAST.format(0)
    found = taken_again(world, config, step)
    assert (found.is_finite, found.found.first) == (False, None)
    assert found.found.odd_gradients
    assert len(found.found.gradient_tasks) == 2
    assert found.cause is not None
    assert "a weight in [loss] (kl, entropy)" in found.cause
    mended = taken_again(world, config, step, "loss.entropy=0", "model.dtype=float32")
    assert mended.is_finite
    assert mended.cause is None
    assert mended.changed == {"loss.entropy": (1e36, 0.0)}
    assert mended.trained_tokens == 16
    assert not mended.found.odd_gradients


def test_the_token_that_spoils_a_step_is_named_though_its_row_is_shared(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][SPOILT] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config = run_config(model, {"kl": 0.1})
    world = run_into_the_ground(tmp_path, config, partial(vary, spoilt=SPOILT))
    found = taken_again(world, config, LAST.format(0))
    first = found.found.first
    assert first is not None
    recorded = fetch(world.store, world.keys, LAST.format(0))
    assert first.task == str(recorded.groups[0].task_id)
    assert (first.rollout, first.token, first.id) == (1, 2, 8)
    assert found.before == SPOILT
    assert (found.found.odd_rollouts, found.found.tokens) == (2, 16)
    assert {"logprob", "base_logprob", "entropy"} <= set(first.odd)
    assert found.base_is_finite is False
    assert found.cause is not None
    assert "the base alone is not finite there" in found.cause


def test_a_preset_brings_its_parts_and_leaves_the_rest_as_it_was_recorded(
    grown: tuple[World, Config],
) -> None:
    world, _ = grown
    record = fetch(world.store, world.keys, LAST.format(1)).step
    settings = settings_of(record, ["loss.preset=gspo", "loss.clip_low=0.01", "bucket.region=x"])
    assert (settings.loss.ratio, settings.loss.clip_high) == ("sequence", 4e-4)
    assert settings.loss.clip_low == 0.01
    assert settings.train.learning_rate == 1e25
    assert settings_of(record, []).loss.preset == "dapo"


@pytest.mark.parametrize(
    ("item", "key"),
    [
        ("loss.clip_low=7", "loss.clip_low"),
        ("loss.clip_cap=1.1", "loss"),
        ("data.path=x", "--set"),
        ("rewards.0.weight=2", "--set"),
    ],
)
def test_a_setting_that_is_wrong_or_changes_nothing_is_refused(
    grown: tuple[World, Config], item: str, key: str
) -> None:
    world, _ = grown
    record = fetch(world.store, world.keys, LAST.format(1)).step
    with pytest.raises(ConfigError) as caught:
        settings_of(record, [item])
    assert caught.value.key == key
    if key == "--set":
        with pytest.raises(ConfigError):
            check_sets([item])


def test_another_base_or_adapter_is_refused(grown: tuple[World, Config], tmp_path: Path) -> None:
    world, config = grown
    recorded = fetch(world.store, world.keys, LAST.format(1))
    settings = settings_of(recorded.step, [])
    other = build_tiny_model(tmp_path / "other", seed=1)
    for table, values, key in (
        ("model", {"name": str(other)}, "model.name"),
        ("lora", {"rank": 2}, "lora.rank"),
        ("lora", {"target_modules": ["k_proj"]}, "lora.target_modules"),
    ):
        changed = getattr(config, table).model_copy(update=values)
        with pytest.raises(ConfigError) as caught:
            replay(recorded, settings, config.model_copy(update={table: changed}))
        assert caught.value.key == key


def test_names_that_are_none_and_parts_that_are_not_whole_are_told_apart(
    grown: tuple[World, Config],
) -> None:
    world, _ = grown
    step = LAST.format(1)
    for name in ("v00000009.e0001.1", "v1.e1.1", "3", "", "latest"):
        with pytest.raises(ConfigError, match=r"name one of v00000001\.e0001\.1") as caught:
            fetch(world.store, world.keys, name)
        assert caught.value.key == "STEP"
    record = fetch(world.store, world.keys, step).step
    parts = [
        record.state,
        record.manifest,
        world.keys.replay(record.id, record.groups[1].task),
        world.keys.replay(record.id, "step.json"),
    ]
    for key in parts:
        before = world.store.get(key).body
        world.store.delete([key])
        world.store.create(key, before[:-1])
        with pytest.raises(IntegrityError):
            fetch(world.store, world.keys, step)
        world.store.delete([key])
        if not key.endswith("step.json"):
            with pytest.raises(IntegrityError, match="is not in the bucket"):
                fetch(world.store, world.keys, step)
        world.store.create(key, before)
    assert fetch(world.store, world.keys, step).step == record
