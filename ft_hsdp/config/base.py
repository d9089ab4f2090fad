"""What every section of the configuration shares."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Strict
from pydantic_core import PydanticCustomError

DAY_S = 86400.0

Int = Annotated[int, Strict()]
"""A whole number: neither true nor "3"."""

Number = Annotated[float, Strict()]
"""A finite number; whole ones are welcome, text is not."""

CROSS_FIELD = "cross_field"
"""Type of the errors made by `refuse`."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are forbidden, infinities and NaN too."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False, hide_input_in_errors=True
    )


def refuse(key: str, value: object, allowed: str) -> PydanticCustomError:
    """The error of a check across fields; `key` is relative to the section that raises it."""
    return PydanticCustomError(
        CROSS_FIELD,
        "{key}: got {value}; allowed: {allowed}",
        {"key": key, "value": value, "allowed": allowed},
    )
