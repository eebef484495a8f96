"""Does an engine serve the version it says it serves, or the base? Pure."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from spotgrpo.shared.manifest import Probe
from spotgrpo.shared.wire import Float32Array

ProbeVerdict = Literal["pass", "fail", "inconclusive"]

NOISE: Final = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Logprob differences (nats) between two correct implementations; for bf16 0.18 to 0.40 were measured at most."""
FOREIGN: Final = 1.0
"""Mean difference (nats) over the whole probe that no precision explains: it is another model."""
CONSIDERED: Final = 16
"""Positions that are compared: those at which version and base differ most."""


def judge(probe: Probe, measured: Float32Array) -> ProbeVerdict:
    """Whether ``measured`` fits the version better than it fits the base.

    Args:
        probe: tokens with the learner's logprobs of version and base.
        measured: float32 [T-1], the engine's logprobs of ``probe.token_ids[1:]`` under the version.

    Returns:
        ``inconclusive`` where version and base differ by less than twice the noise of the dtype at every position,
        as they do for version 0 and may after the first small steps; ``fail`` also where it fits neither.
    """
    version = np.asarray(probe.version_logprobs, dtype=np.float64)
    base = np.asarray(probe.base_logprobs, dtype=np.float64)
    if not len(version) == len(base) == len(measured):
        return "fail"
    if not min(np.abs(measured - version).mean(), np.abs(measured - base).mean()) <= FOREIGN:
        return "fail"
    gap = np.abs(version - base)
    most = np.argsort(-gap)[:CONSIDERED]
    clear = most[gap[most] > 2 * NOISE.get(probe.dtype, NOISE["bfloat16"])]
    if not len(clear):
        return "inconclusive"
    to_version = np.abs(measured[clear] - version[clear]).mean()
    to_base = np.abs(measured[clear] - base[clear]).mean()
    return "pass" if to_version < to_base else "fail"
