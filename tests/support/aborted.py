"""What a job's events say was done in vain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LOSSES = ("gone: ", " broke")


def aborted(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rings that broke, and steps begun twice because somebody was lost; of any number of replicas' journals.

    A step that goes on without the lighthouse's late answer begins anew where that brings somebody in, or another
    number that is wanted. It never does where somebody leaves: that is said with the vote on the step before.
    """
    rows = list(events)
    adopted = [e for e in rows if e["event"] == "GrantAdopted"]
    losses = {e["epoch"] for e in adopted if any(loss in e["reason"] for loss in LOSSES)}
    again = [e for e in rows if e["event"] == "StepRetried" and e["epoch"] in losses]
    return again + [e for e in rows if e["event"] == "RingBroken"]
