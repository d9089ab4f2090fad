from __future__ import annotations

import pytest

from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId

MEMBERS = (
    Member(4, "4-a", "contribute", ("h:1", "h:2"), ("h:3", "h:4")),
    Member(0, "0-b", "behind"),
    Member(2, "2-a", "contribute"),
)
GRANT = Grant(1, 7, StateId(6, 12, "abc"), MEMBERS, 5, "joined: replica 0", (AttemptId(6, 13, 0),), "mac")


def test_the_ring_is_the_order_of_the_members() -> None:
    assert GRANT.ring == (4, 0, 2)


def test_donors_hold_the_base() -> None:
    assert GRANT.donors == (MEMBERS[0], MEMBERS[2])


def test_a_grant_names_incarnations_not_replicas() -> None:
    assert GRANT.member(0, "0-b") is MEMBERS[1]
    assert GRANT.member(0, "0-a") is None
    assert GRANT.member(1, "0-b") is None


def test_a_reason_is_for_humans_only() -> None:
    other = Grant(1, 7, GRANT.base, MEMBERS, 5, "another story", GRANT.void, "mac")
    assert other == GRANT
    assert hash(other) == hash(GRANT)


def test_decisions_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        GRANT.epoch = 8  # type: ignore[misc]
