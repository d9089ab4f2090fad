"""What replicas say of the copies of the state, as one word for the job."""

from __future__ import annotations

from typing import Any

from lighthouse.overview.protection import Protected, Protection


def fold(*rows: tuple[str, int] | tuple[str, int, dict[str, Any]]) -> Protected:
    """The word after these events, each with its replica."""
    protection = Protection()
    for name, replica, *facts in rows:
        more: dict[str, Any] = facts[0] if facts else {}
        protection.event(name, {"replica": replica, "reason": f"{name} {replica}", **more})
    return protection.newest()


def test_nothing_is_known_until_a_replica_has_said_it() -> None:
    assert fold(("CheckedIn", 0)) == Protected("", "", None, "host")


def test_the_one_that_lacks_something_is_believed_until_it_has_it_or_is_gone() -> None:
    good = ("Protected", 0, {"copies": 3, "apart": "rack"})
    assert fold(good) == Protected("protected", "Protected 0", 3, "rack")
    bad = fold(good, ("Unprotected", 1, {"apart": "rack"}))
    assert bad == Protected("unprotected", "Unprotected 1", None, "rack")
    assert fold(good, ("Unprotected", 1), good).word == "unprotected", "replica 0 does not speak for replica 1"
    assert fold(good, ("Unprotected", 1), ("Protected", 1, {"copies": 2})).word == "protected"
    assert fold(good, ("Unprotected", 1), ("ReplicaExited", 1)).word == "protected"


def test_facts_of_another_kind_break_nothing() -> None:
    assert fold(("Protected", 0, {"copies": "many"})).copies is None
