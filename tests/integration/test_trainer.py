"""The trainer on a tiny real Llama: what a step means, that it can be resumed bit for bit, that peft reads it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import PeftModel  # noqa: E402
from safetensors.torch import load  # noqa: E402
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM  # noqa: E402

from spotgrpo.consumer import head as heads  # noqa: E402
from spotgrpo.consumer.model import load_base  # noqa: E402
from spotgrpo.consumer.trainer import PROBE_TOKENS, Trainer  # noqa: E402
from spotgrpo.shared.config import LoraConfig, ModelConfig, TrainConfig  # noqa: E402
from spotgrpo.shared.errors import ConfigError, IntegrityError  # noqa: E402
from spotgrpo.shared.ids import PolicyVersion, TaskId  # noqa: E402
from spotgrpo.shared.wire import Group, Rollout, Sampling, VersionRun  # noqa: E402
from tests.tools.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.engine
LORA = LoraConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(
    tiny: Path,
    *,
    lora: LoraConfig = LORA,
    temperature: float = 1.0,
    seed: int = 0,
    model: dict[str, Any] | None = None,
    **train: Any,
) -> Trainer:
    options = {"learning_rate": 1e-2, "threads": 1, "device": "cpu"} | train
    config = ModelConfig(name=str(tiny), **(model or {}))
    return Trainer(config, lora, TrainConfig(**options), temperature, seed)


def rollout(ids: Sequence[int], reward: float | None) -> Rollout:
    return Rollout(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -2.0, dtype=np.float32),
        loss_mask=np.ones(len(ids), dtype=np.bool_),
        versions=(VersionRun(PolicyVersion(1, 0), len(ids)),),
        reward=reward,
        reward_parts={},
        finish="stop",
    )


def group(index: int, *, rewards: Sequence[float | None] = (1.0, 0.0, 0.0, 1.0)) -> Group:
    random = np.random.default_rng(index)
    lengths = random.integers(1, 7, len(rewards))
    ids = [random.integers(5, 90, length).tolist() for length in lengths]
    return Group(
        run="r",
        task_id=TaskId(index),
        worker="w",
        engine="test",
        engine_version="1",
        manifest_sha256="0" * 64,
        prompt_ids=random.integers(5, 90, 9 + index, dtype=np.int32),
        row={},
        sampling=Sampling(8),
        rollouts=tuple(rollout(*pair) for pair in zip(ids, rewards, strict=True)),
    )


def on_policy(trainer: Trainer, found: Group) -> Group:
    """``found`` with the logprobs that the trainer itself has now."""
    pairs = zip(found.rollouts, trainer.logprobs(found), strict=True)
    return dataclasses.replace(
        found, rollouts=tuple(dataclasses.replace(r, logprobs=logprobs) for r, logprobs in pairs)
    )


def weights(trainer: Trainer) -> dict[str, Any]:
    return {n: t for n, t in load(trainer.state()).items() if n.startswith("weight.")}


def plain_logprobs(model: Any, found: Group, temperature: float) -> list[np.ndarray]:
    """The same by transformers' own forward, one sequence at a time, float64 softmax."""
    result = []
    for one in found.rollouts:
        ids = torch.tensor([[*found.prompt_ids, *one.token_ids]], dtype=torch.long)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0].double() / temperature
        picked = torch.log_softmax(logits, -1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        result.append(picked[len(found.prompt_ids) - 1 :].numpy())
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_shared_prefixes_give_the_logprobs_of_plain_sequences(
    tiny: Path, temperature: float
) -> None:
    trainer = make(tiny, temperature=temperature)
    assert trainer.shares_prompts
    trainer.step([group(0), group(1)])
    folder_model = AutoModelForCausalLM.from_pretrained(tiny)
    trained = PeftModel.from_pretrained(
        folder_model, _write(trainer, tiny.parent / f"t{temperature}")
    )
    for index in range(3):
        pairs = zip(
            trainer.logprobs(group(index)),
            plain_logprobs(trained, group(index), temperature),
            strict=True,
        )
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours, theirs, atol=1e-4)


def _write(trainer: Trainer, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    for name, body in trainer.adapter_files().items():
        (folder / name).write_bytes(body)
    return str(folder)


def test_version_zero_is_the_base(tiny: Path) -> None:
    trainer = make(tiny)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    pairs = zip(trainer.logprobs(group(0)), plain_logprobs(base, group(0), 1.0), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    stored = load(trainer.adapter_files()["adapter_model.safetensors"])
    assert trainer.modules == 2 * 7
    assert len(stored) == 2 * trainer.modules
    assert not any(tensor.any() for name, tensor in stored.items() if "lora_B" in name)
    probe = trainer.probe()
    assert probe.version_logprobs == probe.base_logprobs


def test_the_gradient_does_not_depend_on_the_packing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [group(index) for index in range(4)]
    stats, found = [], []
    for budget in (4096, 40, 12):
        trainer = make(tiny, token_budget=budget, max_grad_norm=1e9)
        stats.append(trainer.step(groups))
        found.append(weights(trainer))
    monkeypatch.setattr("spotgrpo.consumer.trainer.layout_of", lambda *_: "rows")
    with caplog.at_level(logging.WARNING):
        trainer = make(tiny, max_grad_norm=1e9)
    assert "not shared" in caplog.text
    stats.append(trainer.step(groups))
    assert len({one.batches for one in stats}) > 1
    assert stats[2].over_budget > 0
    assert stats[3].input_tokens > stats[0].input_tokens
    for one in stats[1:]:
        assert one.grad_norm == pytest.approx(stats[0].grad_norm, rel=1e-5)
        assert one.loss == pytest.approx(stats[0].loss, abs=1e-5)


def test_chunks_of_the_output_head_change_neither_logprobs_nor_gradient(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(tiny)
    first = whole.step([group(0), group(1)])
    monkeypatch.setattr(heads, "TILE_ELEMENTS", 300)  # three hidden states at a time
    cut = make(tiny)
    second = cut.step([group(0), group(1)])
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.entropy == pytest.approx(first.entropy, rel=1e-5)
    for ours, theirs in zip(whole.logprobs(group(2)), cut.logprobs(group(2)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_gradient_checkpointing_changes_nothing_but_the_memory(tiny: Path) -> None:
    plain, saving = make(tiny), make(tiny, gradient_checkpointing=True)
    for _ in range(2):
        first, second = plain.step([group(0)]), saving.step([group(0)])
        assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_at_lag_zero_the_ratio_is_one(tiny: Path, temperature: float) -> None:
    trainer = make(tiny, temperature=temperature)
    trainer.step([group(5)])
    stats = trainer.step([on_policy(trainer, group(index)) for index in range(3)])
    assert stats.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert abs(stats.mismatch_kl) < 1e-6
    assert stats.clipped_fraction == 0.0
    assert not stats.skipped


def test_steps_raise_the_probability_of_what_is_rewarded(tiny: Path) -> None:
    trainer = make(tiny)
    good, bad = 10, 20
    choice = dataclasses.replace(
        group(0), rollouts=(rollout([good], 1.0), rollout([bad], 0.0), rollout([bad], None))
    )
    before = trainer.logprobs(choice)
    for _ in range(5):
        trainer.step([on_policy(trainer, choice)])
    after = trainer.logprobs(choice)
    assert after[0][0] > before[0][0] + 0.5
    assert after[1][0] < before[1][0]
    probe = trainer.probe()
    place = [good, bad].index(probe.token_ids[-1])
    assert probe.version_logprobs[-1] == pytest.approx(after[place][0], abs=1e-4)
    assert probe.base_logprobs[-1] == pytest.approx(before[place][0], abs=1e-4)


def test_a_probe_is_chosen_where_version_and_base_differ_most_and_then_kept(tiny: Path) -> None:
    trainer = make(tiny, learning_rate=2e-3)

    def apart(ids: Sequence[int]) -> float:
        mine, base = (trainer.sequence_logprobs(ids, adapter=which) for which in (True, False))
        return float(np.linalg.norm(mine - base))

    chosen = []
    for step in range(18):
        groups = [group(3 * step + index) for index in range(3)]
        ends = [
            tuple([*each.prompt_ids.tolist(), *one.token_ids.tolist()][-PROBE_TOKENS:])
            for each in groups
            for one in each.rollouts[:2]  # the first of the best, and of the worst
        ]
        differ = [apart(ids) for ids in ends]
        trainer.step(groups)
        probe = trainer.probe()
        if step and trainer.probe_ids != chosen[-1]:  # at step 0 version and base are the same
            assert trainer.probe_ids == ends[int(np.argmax(differ))]
        chosen.append(trainer.probe_ids)
        np.testing.assert_allclose(
            probe.base_logprobs, trainer.sequence_logprobs(chosen[-1], adapter=False), atol=1e-5
        )
    changes = [step for step in range(1, 18) if chosen[step] != chosen[step - 1]]
    assert changes == [1, 2, 4, 8, 16]


def test_a_resumed_run_is_the_same_bit_for_bit(tiny: Path) -> None:
    steps = [[group(index), group(index + 1)] for index in range(4)]
    straight = make(tiny, lr_schedule="cosine", max_steps=8, weight_decay=0.01)
    for groups in steps:
        straight.step(groups)
    first = make(tiny, lr_schedule="cosine", max_steps=8, weight_decay=0.01)
    for groups in steps[:2]:
        first.step(groups)
    second = make(tiny, seed=9, lr_schedule="cosine", max_steps=8, weight_decay=0.01)
    second.restore(first.state())
    assert second.probe_ids == first.probe_ids
    for groups in steps[2:]:
        second.step(groups)
    assert second.steps_done == straight.steps_done == 4
    assert second.state() == straight.state()
    assert second.adapter_files() == straight.adapter_files()


def test_version_zero_can_be_restored(tiny: Path) -> None:
    first, second = make(tiny), make(tiny, seed=3)
    second.restore(first.state())
    first.step([group(0)])
    second.step([group(0)])
    assert first.state() == second.state()


def test_a_state_of_another_adapter_or_none_at_all_is_refused(tiny: Path) -> None:
    trainer = make(tiny)
    trainer.step([group(0)])
    before = trainer.state()
    for bad in (make(tiny, lora=LoraConfig(rank=8)).state(), before[:-1000], b"not a state", b""):
        with pytest.raises(IntegrityError, match="trainer state"):
            trainer.restore(bad)
    assert trainer.state() == before


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(tiny: Path) -> None:
    first, same, other = make(tiny), make(tiny), make(tiny, seed=1)
    assert first.adapter_files() == same.adapter_files()
    assert first.adapter_files() != other.adapter_files()


def test_flat_groups_and_unscored_rollouts_take_no_part(tiny: Path) -> None:
    alone, beside = make(tiny), make(tiny)
    first = alone.step([group(0)])
    unscored = dataclasses.replace(group(0), rollouts=(*group(0).rollouts, rollout([7, 8], None)))
    second = beside.step([group(3, rewards=[1.0, 1.0]), unscored])
    assert (second.groups, second.flat, second.tokens) == (1, 1, first.tokens)
    assert first.advantage_max == second.advantage_max == pytest.approx(0.5 / 3**-0.5, rel=1e-3)
    assert first.advantage_std == pytest.approx(first.advantage_max)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)


def test_a_masked_token_is_not_trained(tiny: Path) -> None:
    found = group(0)
    cut = dataclasses.replace(
        found.rollouts[0], loss_mask=np.zeros(len(found.rollouts[0].token_ids), dtype=np.bool_)
    )
    stats = make(tiny).step([dataclasses.replace(found, rollouts=(cut, *found.rollouts[1:]))])
    assert stats.tokens == found.tokens - len(cut.token_ids)


def test_a_step_of_flat_groups_leaves_the_weights(tiny: Path) -> None:
    trainer = make(tiny, weight_decay=0.5)
    before = trainer.state()
    stats = trainer.step([group(0, rewards=[2.0, 2.0])])
    assert (stats.skipped, stats.version, trainer.steps_done) == (True, 0, 0)
    assert trainer.state() == before


def test_after_a_step_that_is_not_finite_the_next_one_is_as_if_it_had_never_been(
    tiny: Path,
) -> None:
    """Weights, moments, schedule and probe, bit for bit; a step with a probe of its own is due here."""
    options: dict[str, Any] = {"lr_schedule": "linear", "max_steps": 8, "weight_decay": 0.1}
    trainer, other = make(tiny, **options), make(tiny, **options)
    trainer.step([group(0)])
    before = trainer.state()
    wild = dataclasses.replace(
        group(1),
        rollouts=tuple(
            dataclasses.replace(r, logprobs=np.full_like(r.logprobs, np.nan))
            for r in group(1).rollouts
        ),
    )
    stats = trainer.step([wild])
    assert (stats.skipped, stats.version, trainer.steps_done) == (True, 1, 1)
    assert np.isnan(stats.loss)
    assert trainer.state() == before
    assert not trainer.step([group(2)]).skipped
    other.step([group(0)])
    other.step([group(2)])
    assert trainer.state() == other.state()


def test_half_precision_keeps_float32_master_weights(tiny: Path) -> None:
    trainer = make(tiny, model={"dtype": "bfloat16"})
    assert trainer.shares_prompts
    assert not trainer.step([group(0), group(1)]).skipped
    assert {str(tensor.dtype) for tensor in weights(trainer).values()} == {"torch.float32"}
    stored = load(trainer.adapter_files()["adapter_model.safetensors"])
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.bfloat16"}
    assert trainer.probe().dtype == "bfloat16"


def test_the_gradient_of_a_step_is_the_slope_of_its_loss(tiny: Path) -> None:
    """Central differences along the gradient itself: its squared norm is the slope."""
    trainer = make(tiny, max_grad_norm=1e9)
    trainer.step([group(7)])
    groups = [on_policy(trainer, group(index)) for index in range(2)]
    state = trainer.state()
    captured: dict[str, Any] = {}
    parameters = trainer._parameters
    real = torch.nn.utils.clip_grad_norm_

    def capture(given: Any, limit: float) -> Any:
        captured.update({n: p.grad.clone() for n, p in parameters.items()})
        return real(given, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", capture)
        norm = trainer.step(groups).grad_norm
    losses = []
    for sign in (1.0, -1.0):
        trainer.restore(state)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(captured[name], alpha=sign * 2e-3 / norm)
        losses.append(trainer.step(groups).loss)
    assert (losses[0] - losses[1]) / 4e-3 == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_proj", "nope"], "'nope' is no module"),
        (["lm_head"], "no adapter"),
        ([""], "no module"),
        (["mlp"], "mlp"),
        (["embed_tokens"], "no adapter"),
        (["qkv_proj"], "'qkv_proj' is no module"),  # what vLLM makes of three
    ],
)
def test_target_modules_that_do_not_fit_are_refused_with_those_that_do(
    tiny: Path, targets: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make(tiny, lora=LoraConfig(target_modules=targets))
    assert caught.value.key == "lora.target_modules"
    assert "q_proj" in str(caught.value)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate"]])
def test_experts_and_their_router_carry_no_adapter(
    tmp_path: Path, targets: list[str] | str
) -> None:
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"serve no adapter on (experts, )?gate of this"
    ) as caught:
        make(tmp_path, lora=LoraConfig(target_modules=targets))
    assert caught.value.key == "lora.target_modules"
    assert "use some of k_proj, o_proj, q_proj, v_proj" in str(caught.value)
    assert make(tmp_path, lora=LoraConfig(target_modules=["q_proj"])).modules == 1


def test_chosen_modules_are_named_and_counted(tiny: Path) -> None:
    trainer = make(tiny, lora=LoraConfig(target_modules=["q_proj", "v_proj"], use_rslora=True))
    assert (trainer.target_modules, trainer.modules) == (["q_proj", "v_proj"], 4)
    assert b'"use_rslora": true' in trainer.adapter_files()["adapter_config.json"]


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("model.name", {"model": {"name": "missing"}}),
        ("model.max_context", {"model": {"max_context": 10**6}}),
        ("train.device", {"device": "cuda:99"}),
        ("train.device", {"device": "toaster"}),
    ],
)
def test_what_is_not_there_is_a_config_error(
    tiny: Path, tmp_path: Path, key: str, options: dict[str, Any]
) -> None:
    model = options.pop("model", {})
    folder = tmp_path / model.pop("name") if "name" in model else tiny
    with pytest.raises(ConfigError) as caught:
        make(folder, model=model, **options)
    assert caught.value.key == key


@pytest.mark.parametrize("layout", ["mask", "rows"])
def test_a_model_that_ignores_the_tree_gets_a_mask_and_one_that_ignores_masks_plain_sequences(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """As a causal kernel does that takes no mask: found out by trying, and the logprobs are right all the same."""
    from transformers.models.llama import modeling_llama as llama

    real = llama.LlamaModel.forward

    def deaf(
        self: Any, *args: Any, attention_mask: Any = None, tree: Any = None, **kwargs: Any
    ) -> Any:
        if layout == "rows" and (attention_mask is None or attention_mask.ndim != 2):
            attention_mask = torch.ones_like(kwargs["input_ids"])
        return real(self, *args, attention_mask=attention_mask, **kwargs)

    truth = make(tiny)
    stats = truth.step([group(0), group(1)])
    monkeypatch.setattr(llama.LlamaModel, "forward", deaf)
    trainer = make(tiny)
    assert (truth._layout, trainer._layout) == ("nodes", layout)
    assert (truth.shares_prompts, trainer.shares_prompts) == (True, layout == "mask")
    expected = plain_logprobs(AutoModelForCausalLM.from_pretrained(tiny), group(0), 1.0)
    for ours, theirs in zip(trainer.logprobs(group(0)), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    mine = trainer.step([group(0), group(1)])
    assert mine.grad_norm == pytest.approx(stats.grad_norm, rel=1e-4)


def test_an_attention_of_the_users_choice_is_left_alone(tiny: Path) -> None:
    trainer = make(tiny, model={"attn_implementation": "eager"})
    assert trainer._layout == "mask"
    assert trainer.step([group(0)]).grad_norm == pytest.approx(
        make(tiny).step([group(0)]).grad_norm, rel=1e-4
    )


def test_a_step_never_holds_logits_of_all_tokens(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: no tensor is as large as tokens × vocabulary, and none of a vocabulary over a tile."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Seen(TorchDispatchMode):
        shapes: ClassVar[set[tuple[int, ...]]] = set()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            self.shapes |= {tuple(t.shape) for t in tree_leaves(found) if hasattr(t, "shape")}
            return found

    trainer = make(tiny, learning_rate=1e-4)
    vocabulary = trainer.vocabulary
    groups = [group(index) for index in range(4)]
    monkeypatch.setattr(heads, "TILE_ELEMENTS", 4 * vocabulary)
    with Seen():
        stats = trainer.step(groups)
    of_logits = {shape for shape in Seen.shapes if shape and shape[-1] == vocabulary}
    assert max(int(np.prod(shape)) for shape in of_logits - {(128, vocabulary)}) == 4 * vocabulary
    assert stats.tokens > 4


def test_the_fused_adapter_layers_are_those_of_peft(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(index) for index in range(3)]
    fused = make(tiny)
    monkeypatch.setattr("spotgrpo.consumer.trainer.fuse_lora", lambda *_: 0)
    plain = make(tiny)
    for _ in range(2):
        ours, theirs = fused.step(groups), plain.step(groups)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    for mine, other in zip(fused.logprobs(groups[0]), plain.logprobs(groups[0]), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4)


def test_autocast_computes_in_bfloat16_and_keeps_everything_else(tiny: Path) -> None:
    exact, fast = make(tiny), make(tiny, autocast=True)
    assert (exact.dtype, fast.dtype, fast.probe().dtype) == ("float32", "bfloat16", "bfloat16")
    groups = [group(index) for index in range(3)]
    ours, theirs = fast.step(groups), exact.step(groups)
    assert ours.grad_norm != theirs.grad_norm
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=0.1)
    pairs = zip(fast.logprobs(groups[0]), exact.logprobs(groups[0]), strict=True)
    apart = [float(np.abs(mine - other).max()) for mine, other in pairs]
    assert 0 < max(apart) < 0.3
    stored = load(fast.adapter_files()["adapter_model.safetensors"])
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.float32"}


def test_layers_are_compiled_one_by_one_where_that_is_asked_for(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch makes of them is torch's affair, and takes a minute."""
    compiled: list[str] = []

    def compile_(self: Any, **options: Any) -> None:
        assert options["dynamic"], "the number of tokens differs between micro-batches"
        compiled.append(type(self).__name__)

    monkeypatch.setattr("spotgrpo.consumer.model.leave_uncompiled", lambda: None)
    monkeypatch.setattr(torch.nn.Module, "compile", compile_)
    make(tiny)
    assert not compiled
    make(tiny, compile=True)
    assert compiled == ["LlamaDecoderLayer"] * 2


def test_what_cannot_be_compiled_is_said_before_a_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("spotgrpo.consumer.model.leave_uncompiled", lambda: None)
    monkeypatch.setattr(torch.nn.Module, "compile", refuse)
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler") as caught:
        make(tiny, compile=True)
    assert caught.value.key == "train.compile"


@pytest.mark.parametrize(("device", "remedy"), [("cpu", "needs a GPU"), ("cuda", "pip install")])
def test_a_base_in_four_bits_needs_a_gpu_and_its_library(
    tiny: Path, device: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = ModelConfig(name=str(tiny))
    with pytest.raises(ConfigError, match=remedy) as caught:
        load_base(config, torch.device(device), "nf4")
    assert caught.value.key == "train.quantize"
