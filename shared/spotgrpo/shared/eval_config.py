"""The ``[eval]`` table: which held-out prompts are asked, how often, and what their rewards decide.

What is not named here is as ``data`` and ``sampling`` have it: held-out rows have the columns that rewards need, and
are asked in the same words.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from spotgrpo.shared.ids import MOST_HELD_OUT
from spotgrpo.shared.section import STRICT, Positive


class EvalConfig(BaseModel):
    """Evaluations of policy versions by the same workers; off unless ``every`` is given."""

    model_config = STRICT

    every: Annotated[
        Positive | None,
        Field(description="Evaluate every n-th version on held-out prompts; none: never."),
    ] = None
    path: Annotated[
        str | None, Field(description="Held-out rows: as data.path; none: those of [data].")
    ] = None
    name: Annotated[str | None, Field(description="As data.name, for held-out rows.")] = None
    split: Annotated[
        str | None, Field(description="Split with the held-out rows; none: data.split.")
    ] = None
    revision: Annotated[str | None, Field(description="As data.revision, for held-out rows.")] = (
        None
    )
    reasoning_gym_options: Annotated[
        dict[str, Any],
        Field(description="Held-out tasks of data.reasoning_gym: options over its own; a seed."),
    ] = {}
    prompts: Annotated[
        int, Field(ge=2, le=MOST_HELD_OUT, description="Prompts of an evaluation, at most.")
    ] = 128
    group_size: Annotated[
        int, Field(ge=1, le=4096, description="Completions of a held-out prompt.")
    ] = 1
    temperature: Annotated[
        float, Field(ge=0, le=10, description="Sampling temperature; 0 is greedy.")
    ] = 0.0
    max_new_tokens: Annotated[
        Positive | None,
        Field(description="Tokens of a completion at most; none: sampling.max_new_tokens."),
    ] = None
    share: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Completions that it asks for at a time, as a share of training's.",
        ),
    ] = 0.25
    patience: Annotated[
        Positive | None,
        Field(description="End the run after n evaluations without a better reward; none: never."),
    ] = None

    @model_validator(mode="after")
    def _fits_together(self) -> EvalConfig:
        given = sorted(self.model_fields_set - {"every"})
        if self.every is None and given:
            raise ValueError(f"eval.{given[0]} needs eval.every: without it nothing is evaluated")
        if self.temperature == 0 and self.group_size > 1:
            raise ValueError(
                "eval.group_size above 1 needs eval.temperature above 0: greedy completions are all alike"
            )
        if self.path is None and (self.name is not None or self.revision is not None):
            raise ValueError("eval.name and eval.revision need eval.path")
        return self
