"""What an engine samples that is right, or wrong in one way: token by token from a trainer's own model."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from spotgrpo.consumer.trainer import Trainer
    from spotgrpo.shared.wire import Group, Rollout


def sampled(
    trainer: Trainer,
    like: Group,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    adapter: bool = True,
    tokens: int = 24,
) -> Group:
    """``like`` with completions of ``tokens`` tokens drawn anew, and the logprobs of the distribution drawn from.

    Args:
        temperature, top_p: of that distribution.
        adapter: False samples from the base.
    """
    generator = torch.Generator().manual_seed(like.task_id.index)
    switch = contextlib.nullcontext() if adapter else trainer._adapted.disable_adapter()
    with torch.no_grad(), switch:
        drawn = [
            _drawn(
                trainer._base, one, like.prompt_ids.tolist(), temperature, top_p, tokens, generator
            )
            for one in like.rollouts
        ]
    return dataclasses.replace(like, rollouts=tuple(drawn))


def _drawn(
    model: Any,
    like: Rollout,
    prompt: list[int],
    temperature: float,
    top_p: float,
    tokens: int,
    generator: torch.Generator,
) -> Rollout:
    ids, logprobs = list(prompt), []
    for _ in range(tokens):
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
        probabilities = _truncated(torch.softmax(logits / temperature, -1), top_p)
        chosen = int(torch.multinomial(probabilities, 1, generator=generator))
        ids.append(chosen)
        logprobs.append(float(probabilities[chosen].log()))
    return dataclasses.replace(
        like,
        token_ids=np.array(ids[len(prompt) :], dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        loss_mask=np.ones(tokens, dtype=np.bool_),
        versions=(dataclasses.replace(like.versions[0], tokens=tokens),),
    )


def _truncated(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = probabilities.sort(descending=True)
    kept = torch.zeros_like(probabilities)
    within = order[ordered.cumsum(0) - ordered < top_p]
    kept[within] = probabilities[within]
    return kept / kept.sum()
