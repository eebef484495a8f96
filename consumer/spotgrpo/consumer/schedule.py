"""The learning rate, as a function of the step alone: a resumed run goes on, with more steps or another rate."""

from __future__ import annotations

import math

from spotgrpo.shared.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of optimizer step ``step`` (0 is the first).

    Linear warm-up over ``warmup_steps`` (never from 0), then constant, or linear or cosine decay that would reach
    0 at ``max_steps``.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, config.max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.lr_schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    if config.lr_schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate
