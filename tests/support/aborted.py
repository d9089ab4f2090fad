"""What a job's events say was done in vain."""

from collections.abc import Iterable
from typing import Any

LOSSES = ("gone: ", " broke")


def aborted(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rings that broke, and steps begun twice because somebody was lost; of any number of replicas' journals.

    A step that goes on without the lighthouse's late answer begins anew where that brings somebody in, or another
    number that is wanted. It never does where somebody leaves: that is said with the vote on the step before. An
    answer that comes several steps late is refused; the next epoch of who refused it is no loss.
    """
    rows = list(events)
    adopted = [e for e in rows if e["event"] == "GrantAdopted"]
    late = [e for e in rows if e["event"] == "GrantRefused"]
    instead = {_next_epoch(adopted, refused) for refused in late}
    losses = {e["epoch"] for e in adopted if any(loss in e["reason"] for loss in LOSSES)} - instead
    again = [e for e in rows if e["event"] == "StepRetried" and e["epoch"] in losses]
    return again + [e for e in rows if e["event"] == "RingBroken"]


def _next_epoch(adopted: Iterable[dict[str, Any]], refused: dict[str, Any]) -> int | None:
    same = (e for e in adopted if e["replica"] == refused["replica"] and e["t"] >= refused["t"])
    return next((int(e["epoch"]) for e in sorted(same, key=lambda e: e["t"])), None)
