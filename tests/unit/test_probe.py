from __future__ import annotations

import numpy as np
import pytest

from spotgrpo.producer.probe import judge
from spotgrpo.shared.manifest import Probe

BASE = [-1.0, -2.0, -3.0]
VERSION = [-1.5, -2.0, -2.0]


@pytest.mark.parametrize(
    ("version", "measured", "verdict"),
    [
        (VERSION, VERSION, "pass"),
        (VERSION, BASE, "fail"),
        (VERSION, [-1.4, -2.2, -2.1], "pass"),
        (BASE, BASE, "inconclusive"),  # v0
        (BASE, [-1.3, -2.3, -2.5], "inconclusive"),
        (BASE, [-3.0, -4.0, -1.0], "fail"),  # another model
        (VERSION, [-3.0, -4.0, -0.1], "fail"),
        (BASE, [-1.0, float("nan"), -3.0], "fail"),
        (VERSION, VERSION[:2], "fail"),
    ],
)
def test_a_probe_says_which_model_the_numbers_are_of(
    version: list[float], measured: list[float], verdict: str
) -> None:
    probe = Probe(token_ids=[5, 6, 7, 8], version_logprobs=version, base_logprobs=BASE)
    assert judge(probe, np.array(measured, dtype=np.float32)) == verdict
