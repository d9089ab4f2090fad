"""What replicas say of the copies of the state, as one word for the job."""

from typing import Any

from lighthouse.overview.overview import Protected, Protection


def fold(*rows: tuple[str, int] | tuple[str, int, dict[str, Any]] | tuple[int, ...]) -> Protected:
    """The word after these events, each with its replica, and commits, each as its contributors."""
    protection = Protection()
    for t, row in enumerate(rows, 1):
        match row:
            case (str(name), replica, *facts):
                more: dict[str, Any] = facts[0] if facts else {}
                protection.event(name, {"t": t, "replica": replica, "reason": f"{name} {replica}", **more})
            case _:
                protection.commit(t, row)
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
    assert fold(good, ("Unprotected", 1), ("ReplicaExited", 1)).word == "protected", "replica 0 is left"


def test_nobody_vouches_for_the_copies_once_no_replica_that_contributed_is_left() -> None:
    good, gone = ("Protected", 0, {"copies": 2}), ("ReplicaExited", 0)
    nobody = Protected("", "", None, "host")
    assert fold(good, (0,), gone) == nobody, "one replica has lost a host"
    assert fold(good, (0,), ("ExitReported", 0)) == nobody
    assert fold(good, gone) == nobody
    assert fold(good, (0,), gone, good).word == "protected", "its next incarnation"
    assert fold(good, (0, 1), gone).word == "protected", "replica 1 would say so if it lacked copies"
    assert fold(good, (0, 1), ("ReplicaExited", 1)).word == "protected"
    assert fold(good, (0, 1), gone, (1,), ("ReplicaExited", 1)) == nobody
    assert fold(good, (0, 1), (1,), gone, ("ReplicaExited", 1)) == nobody


def test_rows_of_before_an_exit_that_come_after_it_change_nothing() -> None:
    good, gone = ("Protected", 0, {"copies": 2, "t": 1}), ("ReplicaExited", 0, {"t": 50})
    assert fold(gone, good).word == ""
    assert fold(gone, ("Unprotected", 0)).word == ""
    late = Protection()
    late.event("Protected", {"t": 1, "replica": 0})
    late.commit(2, (0, 1))
    for t, replica in ((3, 1), (3, 0)):
        late.event("ReplicaExited", {"t": t, "replica": replica})
        late.commit(2.5, (0, 1))
    assert late.newest().word == ""


def test_facts_of_another_kind_break_nothing() -> None:
    assert fold(("Protected", 0, {"copies": "many"})).copies is None
