"""The ``[loss]`` table: which parts the loss is made of. Importable without torch.

A preset is a published name for a choice of parts; any part that is given beside it wins. What each part
computes stands with its function in ``spotgrpo.consumer.losses``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, Field, model_validator

from spotgrpo.shared.section import STRICT, NonNegative, Positive

Preset: TypeAlias = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "gepo", "m2po", "decoupled_ppo"
]
Level: TypeAlias = Literal["token", "sequence", "group"]
Anchor: TypeAlias = Literal["behaviour", "current", "proximal"]
Clip: TypeAlias = Literal["ratio", "weight", "none"]
Correction: TypeAlias = Literal["truncate", "mask", "reject", "tv", "m2"]
Aggregate: TypeAlias = Literal["token", "sequence", "constant"]
Baseline: TypeAlias = Literal["mean", "leave_one_out"]
AdvantageScale: TypeAlias = Literal["group_std", "batch_std", "none"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
Overlong: TypeAlias = Literal["keep", "mask", "shape"]

COMMON: Final[Mapping[str, Any]] = {
    "ratio": "token",
    "anchor": "behaviour",
    "clip": "ratio",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "corrections": [],
    "aggregate": "token",
    "advantage_scale": "group_std",
}
PRESETS: Final[Mapping[Preset, Mapping[str, Any]]] = {
    "grpo": {**COMMON, "aggregate": "sequence"},
    "dr_grpo": {**COMMON, "aggregate": "constant", "advantage_scale": "none"},
    "dapo": {**COMMON, "clip_high": 0.28},
    "gspo": {
        **COMMON,
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregate": "sequence",
    },
    # The paper gives no bound: 5, as ScaleRL (arXiv:2510.13786) found it, and none below.
    "cispo": {**COMMON, "clip": "weight", "clip_low": 1.0, "clip_high": 4.0},
    "gepo": {
        **COMMON,
        "ratio": "group",
        "clip": "none",
        "aggregate": "sequence",
        "advantage_scale": "none",
    },
    "m2po": {**COMMON, "clip": "none", "corrections": ["m2"]},
    "decoupled_ppo": {**COMMON, "anchor": "proximal"},
}
"""Parts by published name: the loss alone. KL, entropy, overlong completions and ``train.refill_flat`` (DAPO's
dynamic sampling) are options of their own, off in every preset."""


class LossConfig(BaseModel):
    """The loss, part by part; what is not given is as the preset has it."""

    model_config = STRICT

    preset: Annotated[
        Preset, Field(description="Published loss that gives the parts which are not set here.")
    ] = "dapo"
    ratio: Annotated[
        Level,
        Field(description="Importance ratio of each token, sequence (GSPO) or group (GEPO)."),
    ] = "token"
    anchor: Annotated[
        Anchor,
        Field(
            description="Policy that the clip measures from: that which sampled, the current one, or one between."
        ),
    ] = "behaviour"
    clip: Annotated[
        Clip,
        Field(description="ratio: PPO's clip; weight: CISPO's, every token keeps its gradient."),
    ] = "ratio"
    clip_low: Annotated[
        float, Field(gt=0, le=1, description="Ratio is clipped below 1 - clip_low.")
    ] = 0.2
    clip_high: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="Ratio is clipped above 1 + clip_high (DAPO's clip-higher).",
        ),
    ] = 0.28
    clip_cap: Annotated[
        float | None,
        Field(
            gt=1,
            allow_inf_nan=False,
            description="Highest ratio where the advantage is negative (dual clip); none: no cap.",
        ),
    ] = None
    corrections: Annotated[
        list[Correction],
        Field(
            description="Against the gap between sampler and trainer, any of: truncate, mask, reject, tv, m2."
        ),
    ] = []
    truncate_above: Annotated[
        float, Field(ge=1, allow_inf_nan=False, description="truncate: weights are cut off here.")
    ] = 2.0
    mask_below: Annotated[
        float, Field(ge=0, le=1, description="mask (IcePop): tokens with a ratio below go.")
    ] = 0.5
    mask_above: Annotated[
        float,
        Field(
            ge=1, allow_inf_nan=False, description="mask (IcePop): tokens with a ratio above go."
        ),
    ] = 5.0
    reject_below: Annotated[
        float,
        Field(ge=0, le=1, description="reject: sequences whose mean ratio is below go."),
    ] = 0.5
    reject_above: Annotated[
        float,
        Field(
            ge=1,
            allow_inf_nan=False,
            description="reject: sequences whose mean (geometric) ratio is above go.",
        ),
    ] = 2.0
    tv_limit: Annotated[
        float,
        Field(
            gt=0, le=1, description="tv (DPPO): tokens that moved further in probability stay put."
        ),
    ] = 0.2
    m2_limit: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="m2 (M2PO): greatest mean squared log ratio; outliers go until it holds.",
        ),
    ] = 0.04
    aggregate: Annotated[
        Aggregate,
        Field(
            description="Mean over the step's tokens, mean of each sequence's mean, or a constant (Dr. GRPO)."
        ),
    ] = "token"
    constant_tokens: Annotated[
        Positive | None,
        Field(description="Tokens of a completion in the constant; none: sampling.max_new_tokens."),
    ] = None
    baseline: Annotated[
        Baseline, Field(description="What a reward is compared with: its group, or the others.")
    ] = "mean"
    advantage_scale: Annotated[
        AdvantageScale,
        Field(description="Divide advantages by the std of the group, of the step, or not."),
    ] = "group_std"
    kl: Annotated[
        NonNegative,
        Field(description="Weight of KL to the base; above 0 costs a forward pass without it."),
    ] = 0.0
    kl_estimator: Annotated[KlEstimator, Field(description="Estimator of that KL.")] = "k3"
    kl_weighted: Annotated[
        bool, Field(description="Weight its tokens by importance ratio, so that it has no bias.")
    ] = False
    entropy: Annotated[
        NonNegative, Field(description="Weight of the entropy bonus; above 0 costs memory.")
    ] = 0.0
    overlong: Annotated[
        Overlong,
        Field(
            description="Completions that the token limit cut: keep, mask (not trained), or shape (DAPO's penalty)."
        ),
    ] = "keep"
    overlong_tokens: Annotated[
        Positive | None,
        Field(
            description="shape: the penalty grows over so many last tokens; none: a fifth of sampling.max_new_tokens."
        ),
    ] = None
    overlong_penalty: Annotated[
        float,
        Field(gt=0, allow_inf_nan=False, description="shape: the most it takes off a reward."),
    ] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset", cls.model_fields["preset"].default)
        known = isinstance(preset, str) and preset in PRESETS
        return {**PRESETS[preset], **given} if known else given

    @model_validator(mode="after")
    def _fits_together(self) -> LossConfig:
        if self.ratio == "group" and self.anchor != "behaviour":
            raise ValueError("loss.ratio = 'group' needs loss.anchor = 'behaviour'")
        if self.clip_cap is not None and self.clip != "ratio":
            raise ValueError("loss.clip_cap needs loss.clip = 'ratio'")
        if self.clip_cap is not None and self.clip_cap <= 1.0 + self.clip_high:
            raise ValueError("loss.clip_cap must be above 1 + loss.clip_high")
        if len(set(self.corrections)) < len(self.corrections):
            raise ValueError("loss.corrections names one of them twice")
        return self

    @property
    def regularises(self) -> bool:
        """True where a group without reward variance has a gradient all the same."""
        return self.kl > 0 or self.entropy > 0
