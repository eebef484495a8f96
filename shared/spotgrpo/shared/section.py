"""What the tables of the configuration have in common."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

STRICT: Final = ConfigDict(
    extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
)
"""Unknown keys are refused, and no value of a secret gets into an error."""
