"""What a job's events say was done in vain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def aborted(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rings that broke and steps that were begun twice, by the journals of any number of replicas.

    A step that goes on without the lighthouse's late answer begins anew when that answer brings somebody in.
    It never does when somebody leaves: that is said with the vote on the step before.
    """
    rows = list(events)
    adopted = [e for e in rows if e["event"] == "GrantAdopted"]
    grown = {e["epoch"] for e in adopted if "joined: " in e["reason"] or "caught up: " in e["reason"]}
    again = [e for e in rows if e["event"] == "StepRetried" and e["epoch"] not in grown]
    return again + [e for e in rows if e["event"] == "RingBroken"]
