"""What every result has: where and with what it was measured, the goals, the notes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ft_hsdp.bench.goals import Verdict
from ft_hsdp.bench.machine import machine, now, versions
from ft_hsdp.bench.plan import Log

BUSY = 1.0  # load from which on others have disturbed


def begin(name: str, log: Log) -> tuple[dict[str, Any], float]:
    """A result without figures, and when it was begun; a note if the machine has other work."""
    where = machine()
    if (load := where["load_1min_before"]) > BUSY:
        log.note(f"the machine was busy: a load of {load:g} before; read nothing into these figures")
    return {"bench": name, "date": now(), "machine": where, "versions": versions()}, time.monotonic()


def finish(result: dict[str, Any], found: Sequence[Verdict], log: Log, started: float) -> dict[str, Any]:
    """The result with its goals, notes and duration: ready for JSON."""
    result["goals"] = [asdict(verdict) for verdict in found]
    result["notes"] = log.notes
    result["seconds"] = round(time.monotonic() - started, 1)
    return result
