"""The values that a training loop logs by `Job.log`, as rows. Pure."""

from __future__ import annotations

import re
from typing import Any

VALUE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,63}")
MAX_VALUES = 64  # names in a job

Row = dict[str, Any]


def is_logged(row: Row) -> bool:
    """Return whether a row has values of a step."""
    return isinstance(row.get("values"), dict) and all(isinstance(row.get(key), int) for key in ("step", "epoch"))


def logged_row(row: Row) -> Row:
    """Return the line of metrics.jsonl for values of a step."""
    return {"t": row.get("t"), "step": row["step"], "logged": row["values"]}
