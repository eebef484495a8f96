"""A run that evaluates, with the commands a user types: real servers, a tiny real model, real processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spotgrpo.consumer.export import export_version
from spotgrpo.shared.config import ModelConfig
from spotgrpo.shared.ids import PolicyVersion
from tests.e2e.test_run import Run, run

__all__ = ["run"]

REWARDS = """
def digits(completions, wanted, **_):
    return [len(set(text)) / 6 for text in completions]
"""
TABLE = """
[eval]
every = 2
path = "heldout.jsonl"
prompts = 6
"""


@pytest.mark.timeout(300)
def test_the_best_version_is_found_and_exported_and_is_worth_what_was_said(run: Run) -> None:
    prompts = [f"{i} minus 1 is " for i in range(7)]
    rows = [{"prompt": prompt, "wanted": "0"} for prompt in prompts]
    (run.folder / "heldout.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run.folder / "rewards.py").write_text(REWARDS)
    toml = run.folder / "run.toml"
    toml.write_text(toml.read_text().replace("[data]", "[data]\nshuffle = false") + TABLE)
    learner = run.start("learner", "--set", "train.max_steps=3")
    worker = run.start("worker")
    run.wait_for("the end", lambda: learner.poll() == 0)
    run.wait_for("the worker to leave", lambda: worker.poll() == 0, 60)

    folder = run.folder / "runs" / run.id
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {line["eval_version"]: line["eval_reward"] for line in lines if line["role"] == "eval"}
    assert {0, 3} <= set(found) <= {0, 2, 3}, "version 2 may come while version 0 is evaluated"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_reward"] == max(found.values())
    latest = run.latest()
    assert latest is not None
    assert latest.evaluated is not None
    assert latest.evaluated.best is not None
    assert str(latest.evaluated.best.policy) == summary["best_version"]

    exported = run.command("export", "run.toml", "--best", "--out", "best", "--json")
    assert exported.returncode == 0, exported.stderr
    model = run.folder / "model"
    export_version(
        run.store,
        run.keys,
        PolicyVersion(1, 3),
        run.folder / "newest",
        merge=False,
        model_config=ModelConfig(name=str(model)),
    )
    for name, reward in (("best", summary["best_reward"]), ("newest", found[3])):
        worth = greedy_reward(model, run.folder / name, prompts[:6])
        assert worth == pytest.approx(reward, abs=1e-9), name


def greedy_reward(model: Path, adapter: Path, prompts: Sequence[str]) -> float:
    """By plain transformers and peft, a prompt at a time."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter))
    total = 0.0
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            out = served.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        total += len(set(text)) / 6
    return total / len(prompts)
