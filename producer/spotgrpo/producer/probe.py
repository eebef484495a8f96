"""Does an engine serve the version it says it serves, or the base? Pure."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np

from spotgrpo.shared.manifest import Probe
from spotgrpo.shared.wire import Float32Array

ProbeVerdict = Literal["pass", "fail", "inconclusive"]

NOISE: Final = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Logprob differences (nats) between two correct implementations; for bf16 0.18 to 0.40 were measured at most.
On the line that ``judge`` looks at: 2e-5 in float32; in bf16 0.12 (rms), 0.24 at most (vLLM and SmolLM2)."""
FOREIGN: Final = 1.0
"""Mean difference (nats) over the whole probe that no precision explains: it is another model."""


def noise_of(*dtypes: str) -> float:
    """What the coarsest of ``dtypes`` may differ by (nats); that of bfloat16 for names that are not known."""
    return max(NOISE.get(dtype, NOISE["bfloat16"]) for dtype in dtypes)


def judge(probe: Probe, measured: Float32Array, engine_dtype: str | None = None) -> ProbeVerdict:
    """Whether ``measured`` fits the version better than it fits the base.

    All logprobs of a probe are one point. On the line from the base to the version, the point that was measured has to
    be nearer to the version than to the base, by more than the noise of the dtype: tokens at which the two differ most
    weigh most, and noise that points elsewhere does not count.

    Args:
        probe: tokens with the learner's logprobs of version and base.
        measured: float32 [T-1], the engine's logprobs of ``probe.token_ids[1:]`` under the version.
        engine_dtype: what the engine computes in; None: what the learner does.

    Returns:
        ``inconclusive`` where it is about as near to the one as to the other, as always where version and base are less
        than twice the noise apart: version 0 is the base, and the first small steps stay near it. ``fail`` also where
        it fits neither.
    """
    version = np.asarray(probe.version_logprobs, dtype=np.float64)
    base = np.asarray(probe.base_logprobs, dtype=np.float64)
    if not len(version) == len(base) == len(measured):
        return "fail"
    if not min(np.abs(measured - version).mean(), np.abs(measured - base).mean()) <= FOREIGN:
        return "fail"
    noise = noise_of(probe.dtype, engine_dtype or probe.dtype)
    apart = float(np.linalg.norm(version - base))
    if apart <= 2 * noise:
        return "inconclusive"
    from_middle = float((version - base) @ (measured - (version + base) / 2)) / apart
    if abs(from_middle) <= noise:
        return "inconclusive"
    return "pass" if from_middle > 0 else "fail"
