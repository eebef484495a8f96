"""The probe of a version: tokens whose logprobs tell it from the base, and from every other version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotgrpo.shared.manifest import Probe

if TYPE_CHECKING:
    from spotgrpo.consumer.trainer import Trainer


def make_probe(trainer: Trainer) -> Probe:
    """Logprobs at temperature 1 of the trainer's version and of its base, on the end of what it trained last.

    For version 0 both are equal, so that an engine can only call the probe inconclusive. Two forward passes of at
    most 32 tokens.
    """
    token_ids = trainer.probe_ids
    return Probe(
        token_ids=list(token_ids),
        version_logprobs=trainer.sequence_logprobs(token_ids, adapter=True).tolist(),
        base_logprobs=trainer.sequence_logprobs(token_ids, adapter=False).tolist(),
        dtype=trainer.dtype,
    )
