from __future__ import annotations

import numpy as np
import pytest

from spotgrpo.producer.probe import NOISE, judge
from spotgrpo.shared.manifest import Probe

BASE = [-1.0, -2.0, -3.0]
VERSION = [-1.5, -2.0, -2.0]


@pytest.mark.parametrize(
    ("version", "measured", "verdict"),
    [
        (VERSION, VERSION, "pass"),
        (VERSION, BASE, "fail"),
        (VERSION, [-1.4, -2.2, -2.1], "pass"),
        (VERSION, [-1.1, -2.2, -2.9], "fail"),
        (VERSION, [-1.25, -2.3, -2.5], "inconclusive"),  # half way between the two
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


@pytest.mark.parametrize(
    ("learner", "engine", "measured", "verdict"),
    [
        ("float32", "float32", 0.0, "fail"),
        ("float32", None, 0.0, "fail"),
        ("float32", "bfloat16", 0.0, "inconclusive"),
        ("bfloat16", "float32", 0.3, "inconclusive"),
        ("bfloat16", "bfloat16", 0.3, "inconclusive"),
        ("float16", "float16", 0.0, "fail"),
        ("float16", "float16", 0.3, "pass"),
        ("float32", "something else", 0.0, "inconclusive"),
    ],
)
def test_the_coarser_of_two_dtypes_says_what_is_noise(
    learner: str, engine: str | None, measured: float, verdict: str
) -> None:
    """Version and base are 0.3 nats apart, at one token."""
    probe = Probe(
        token_ids=[1, 2, 3],
        version_logprobs=[-1.0, -1.7],
        base_logprobs=[-1.0, -2.0],
        dtype=learner,
    )
    found = np.array([-1.0, -2.0 + measured], dtype=np.float32)
    assert judge(probe, found, engine) == verdict


@pytest.mark.parametrize("dtype", sorted(NOISE))
def test_what_differs_a_little_at_every_token_is_told_apart_like_what_differs_much_at_one(
    dtype: str,
) -> None:
    """Noise of a typical size (a third of the bound) at every token turns no verdict, however it falls."""
    random = np.random.default_rng(0)
    base = random.normal(-2.0, 1.0, 31)
    gap = 4 * NOISE[dtype] / np.sqrt(31) * random.choice([-1.0, 1.0], 31)
    probe = Probe(
        token_ids=list(range(32)),
        version_logprobs=(base + gap).tolist(),
        base_logprobs=base.tolist(),
        dtype=dtype,
    )
    for _ in range(100):
        noise = random.normal(0.0, NOISE[dtype] / 3, 31)
        assert judge(probe, (base + gap + noise).astype(np.float32)) != "fail"
        assert judge(probe, (base + noise).astype(np.float32)) != "pass"
    assert judge(probe, (base + gap).astype(np.float32)) == "pass"
    assert judge(probe, base.astype(np.float32)) == "fail"
