from dataclasses import replace

import pytest

from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.grant import Grant, Member, paths, ranges, ranks_of
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.core.state_id import StateId

MEMBERS = (
    Member(4, "4-a", "contribute", ("h:1", "h:2"), ("h:3", "h:4")),
    Member(0, "0-b", "behind"),
    Member(2, "2-a", "contribute"),
)
GRANT = Grant(1, 7, StateId(6, 12, "abc"), MEMBERS, 5, "joined: replica 0", (AttemptId(6, 13, 0),), mac="mac")


def test_the_ring_is_the_order_of_the_members_and_donors_hold_the_base() -> None:
    assert GRANT.ring == (4, 0, 2)
    assert GRANT.donors == (MEMBERS[0], MEMBERS[2])


def test_a_grant_names_incarnations_not_replicas() -> None:
    assert GRANT.member(0, "0-b") is MEMBERS[1]
    assert GRANT.member(0, "0-a") is None
    assert GRANT.member(1, "0-b") is None


def test_a_reason_is_for_humans_only() -> None:
    other = Grant(1, 7, GRANT.base, MEMBERS, 5, "another story", GRANT.void, mac="mac")
    assert other == GRANT
    assert hash(other) == hash(GRANT)


def test_places_are_those_of_an_undisturbed_step_unless_the_grant_says_otherwise() -> None:
    members = (
        Member(4, "4-a", "contribute", units=3, places=((0, 2), (9, 1))),
        Member(0, "0-b", "behind", units=2),
        Member(1, "1-b", "standby", units=0),
        Member(2, "2-a", "contribute", units=3),
    )
    own = Grant(1, 7, StateId(6, 12, "abc"), members, 5, "", units=6)
    assert own.places(13) == {4: ((0, 2), (9, 1)), 2: ((0, 3),)}
    assert own.places(14) == {4: ((0, 3),), 2: ((0, 3),), 0: ((0, 2),)}
    assert [own.following(14, r) for r in (4, 2, 0)] == [3, 3, 2]
    shared = replace(own, shared=True)
    assert shared.places(14) == {4: ((0, 3),), 2: ((3, 3),), 0: ((6, 2),)}
    assert [shared.following(14, r) for r in (4, 2, 0)] == [6, 9, 12]


def test_a_host_is_named_once_with_its_ranks() -> None:
    assert ranges(["a/1/n0", "a/1/n0", "a/1/n1"]) == (("a/1/n0", 2), ("a/1/n1", 1))
    dealt = ranges(["n0", "n1", "n1", "n0", "n2", "n2"])
    assert dealt == (("n0", ((0, 1), (3, 1))), ("n1", ((1, 2),)), ("n2", ((4, 2),))), "ranks of others are between"
    assert ranks_of(dealt) == [("n0", [0, 3]), ("n1", [1, 2]), ("n2", [4, 5])]
    assert ranges(["n0", ""]) == ranges(["", "n0", ""]) == ()
    assert ranges([]) == ()


@pytest.mark.parametrize("said", ["a", "aabb", "abab", "abba", "aabcab", "abcabcabc", "baab"])
def test_the_host_of_each_rank_is_what_it_was(said: str) -> None:
    found = ranges(said)
    assert paths(found) == tuple(said)
    assert [path for path, _ in found] == list(dict.fromkeys(said)), "each once, in the order of first ranks"
    assert sorted(rank for _, ranks in ranks_of(found) for rank in ranks) == list(range(len(said)))


def test_hosts_that_were_named_twice_by_an_earlier_checkout_are_understood() -> None:
    assert paths((("n0", 1), ("n1", 2), ("n0", 1))) == ("n0", "n1", "n1", "n0")


# The names of incarnations are built and read in one way.


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("0-abc-2", IncarnationId(0, "abc", 2)),
        ("12-ab-cd-0", IncarnationId(12, "ab-cd", 0)),
        ("999-run_1.x-10", IncarnationId(999, "run_1.x", 10)),
        ("7--1", IncarnationId(7, "", 1)),
    ],
)
def test_a_name_is_read_as_it_was_built(text: str, parsed: IncarnationId) -> None:
    assert IncarnationId.parse(text) == parsed
    assert str(parsed) == text


def test_a_name_without_a_number_of_restarts_is_the_first_life() -> None:
    assert IncarnationId.parse("0-abc") == IncarnationId(0, "abc", 0)
    assert IncarnationId.parse("0-ab-cd") == IncarnationId(0, "ab-cd", 0)
    assert IncarnationId.parse("1-0") == IncarnationId(1, "", 0)


@pytest.mark.parametrize(
    "text", ["", "0", "0-", "-abc-1", "x-abc-1", "1000-abc-1", "0-a b-1", "0-run-²", "0-abc-1\n", "0-" + "x" * 201]
)
def test_another_text_is_no_name(text: str) -> None:
    assert IncarnationId.parse(text) is None


def test_the_lives_before_are_those_of_the_same_run() -> None:
    third = IncarnationId(3, "abc", 2)
    assert third.previous == IncarnationId(3, "abc", 1)
    first = IncarnationId(3, "abc", 0)
    assert first.previous is None
