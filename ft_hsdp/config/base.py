"""What all sections of the configuration share."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

DAY_S = 86400.0

Int = Annotated[int, Strict()]
"""A whole number: neither true nor "3"."""

Number = Annotated[float, Strict()]
"""A finite number, whole or not, but no text."""

PositiveNumber = Annotated[Number, Field(gt=0)]
"""A finite number above 0."""

Seconds = Annotated[Number, Field(ge=0, le=DAY_S)]
"""A time of at most a day."""

PositiveSeconds = Annotated[Number, Field(gt=0, le=DAY_S)]
"""A time above 0, of at most a day."""

CROSS_FIELD = "cross_field"
"""Type of the errors made by `refuse`."""


class Section(BaseModel):
    """A frozen group of keys; unknown keys are forbidden, infinities and NaN too."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False, hide_input_in_errors=True
    )


def refuse(key: str, value: object, allowed: str) -> PydanticCustomError:
    """Return the error of a check between keys; a validator raises it.

    Args:
        key: relative to the section that raises the error; "" if the value is the key's own.
        allowed: what may stand there, in words.

    Returns:
        An error that `explain` turns into one line.
    """
    return PydanticCustomError(
        CROSS_FIELD,
        "{key}: got {value}; allowed: {allowed}",
        {"key": key, "value": value, "allowed": allowed},
    )


def _expanded(path: str) -> str:
    found = os.path.expanduser(path)
    if re.search(r"\$[A-Za-z_{]", path):
        raise refuse("", path, 'a path without $: let the shell put the variable in, --key="$DIR"')
    if found.startswith("~"):
        raise refuse("", path, "a path whose ~ is the home of a user; here it is not known (is HOME set?)")
    return found


PathText = Annotated[str, Field(min_length=1), AfterValidator(_expanded)]
"""A path. ~ is the home of a user of this machine; a variable of the shell is refused."""
