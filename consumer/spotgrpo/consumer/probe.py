"""The probe of a version: tokens whose logprobs tell it from the base, and from every other version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotgrpo.shared.manifest import Probe

if TYPE_CHECKING:
    from spotgrpo.consumer.trainer import Trainer


def make_probe(trainer: Trainer) -> Probe:
    """Logprobs at temperature 1 of the trainer's version and of its base, on the end of what it trained last.

    For version 0 both are equal, so that an engine can only call the probe inconclusive. One forward pass of at
    most 32 tokens, two where the tokens are new.
    """
    version, base = trainer.probe_logprobs()
    return Probe(
        token_ids=list(trainer.probe_ids),
        version_logprobs=version.tolist(),
        base_logprobs=base.tolist(),
        dtype=trainer.dtype,
    )
