"""One message of each kind, with every field set: what the golden bytes under tests/golden are made of.

``python -m tests.tools.wire_samples`` writes them anew. Do that only with a new schema, whose number is in the name.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spotgrpo.shared import wire
from spotgrpo.shared.ids import PolicyVersion, TaskId

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parent.parent / "golden"

SAMPLING = wire.Sampling(
    max_new_tokens=7, temperature=0.7, stop=("\n", "ende"), stop_token_ids=(2, 151_645)
)
PROMPT_IDS = (1, 2, 70_000)
ROW: wire.Row = {"answer": 42, "text": "größer", "nested": {"list": [1, 2.5, None, True]}}

TASK = wire.Task(
    run="golden",
    task_id=TaskId(12, 3),
    prompt_ids=PROMPT_IDS,
    prompt=[{"role": "user", "content": "max(1, 2) ="}],
    row=ROW,
    sampling=SAMPLING,
    seeds=(0, 1, 2**63 - 1),
    min_version=4,
    pinned=PolicyVersion(epoch=2, number=5),
    kind="eval",
)


def rollout(tokens: int, reward: float | None = 0.5) -> wire.Rollout:
    """A rollout of ``tokens`` tokens (2 or more), the first of an older version."""
    return wire.Rollout(
        token_ids=np.arange(tokens, dtype=np.int32) + 65_536,
        logprobs=-np.arange(tokens, dtype=np.float32) / 8,
        loss_mask=np.arange(tokens) % 2 == 0,
        versions=(
            wire.VersionRun(PolicyVersion(1, 4), 1),
            wire.VersionRun(PolicyVersion(2, 5), tokens - 1),
        ),
        reward=reward,
        reward_parts={"exact": reward, "format": None},
        finish="length",
    )


GROUP = wire.Group(
    run="golden",
    task_id=TaskId(12, 3),
    worker="host-1234",
    engine="transformers",
    engine_version="5.19.0",
    manifest_sha256="ab" * 32,
    prompt_ids=np.array(PROMPT_IDS, dtype=np.int32),
    row=ROW,
    sampling=SAMPLING,
    rollouts=(rollout(2), rollout(5, None)),
    kind="train",
    started_at=1.5,
    generated_at=2.25,
    scored_at=3.125,
)


def partial_rollout(seed: int, tokens: int, finish: wire.Finish | None) -> wire.PartialRollout:
    """A rollout as far as ``tokens`` tokens, the first of an older version."""
    runs = (
        wire.VersionRun(PolicyVersion(1, 4), 1),
        wire.VersionRun(PolicyVersion(2, 5), tokens - 1),
    )
    return wire.PartialRollout(
        seed=seed,
        token_ids=np.arange(tokens, dtype=np.int32) + 65_536,
        logprobs=-np.arange(tokens, dtype=np.float32) / 8,
        versions=tuple(run for run in runs if tokens and run.tokens),
        finish=finish,
    )


PARTIAL = wire.Partial(
    run="golden",
    task_id=TaskId(12, 3),
    worker="host-1234",
    prompt_ids=np.array(PROMPT_IDS, dtype=np.int32),
    sampling=SAMPLING,
    rollouts=(
        partial_rollout(0, 3, None),
        partial_rollout(1, 0, None),
        partial_rollout(2**63 - 1, 7, "length"),
    ),
    saved_at=3.125,
)
GROUP_REF = wire.GroupRef(
    "golden", TaskId(12, 3), "golden/groups/00000012.3.abc", "cd" * 32, 123_456_789
)
REPORT = wire.Report(
    "host-1234", "worker", 1_700_000_000.25, {"tokens": 12, "rate": 1.5, "state": "ok", "no": None}
)

SAMPLES: dict[str, tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "task": (TASK, wire.encode_task, wire.decode_task),
    "group": (GROUP, wire.encode_group, wire.decode_group),
    "group_ref": (GROUP_REF, wire.encode_group_ref, wire.decode_group_ref),
    "partial": (PARTIAL, wire.encode_partial, wire.decode_partial),
    "report": (REPORT, wire.encode_report, wire.decode_report),
}


def golden_path(kind: str, schema: int = wire.SCHEMA) -> Path:
    """Where the golden bytes of a kind lie, as hex."""
    return GOLDEN / f"{kind}.v{schema}.hex"


def main() -> None:
    """Write the golden bytes of the current schema."""
    GOLDEN.mkdir(exist_ok=True)
    for kind, (value, encode, _) in SAMPLES.items():
        golden_path(kind).write_text("\n".join(textwrap.wrap(encode(value).hex(), 96)) + "\n")


if __name__ == "__main__":
    main()
