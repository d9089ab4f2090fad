import doctest

from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.grant import Member
from lighthouse import quorum
from lighthouse.quorum import rules
from lighthouse.quorum.rules import Base, Epoch
from tests.support.lighthouse.lighthouse_helpers import START, at, name, record, report

LIVES = [(r, name(r)) for r in range(3)]


def test_highest_is_by_commit_epoch_before_step():
    base = rules.highest([report(0, at(1, 9)), report(1, at(2, 3)), report(2, START)])
    assert base == Base(at(2, 3), None, ())


def test_a_void_attempt_does_not_count_but_a_later_one_does():
    first, second = record(START, 1), record(START, 1, attempt=1)
    void = AttemptId(1, 1, 0)
    assert rules.highest([report(0, prepared=first), report(1, void=void)]) == Base(START, None, (void,))
    assert rules.highest([report(0, prepared=second), report(1, void=void)]).state == second.state_id


def test_two_records_of_one_attempt_with_different_digests_count_for_nothing():
    reports = [report(0, prepared=record(START, 1)), report(1, prepared=record(START, 1, digest="other"))]
    assert rules.highest(reports).state == START


def test_role_needs_exactly_the_base():
    """Counter-example 1: the same step under another epoch is another state."""
    mine, theirs = record(START, 1), record(START, 2)
    base = Base(theirs.state_id, theirs, ())
    assert rules.role(report(0, prepared=mine), base) == "behind"
    assert rules.role(report(0, prepared=theirs), base) == "contribute"
    assert rules.role(report(0, theirs.state_id), base) == "contribute"
    assert rules.role(report(1), base) == "behind"


def test_an_epoch_is_covered_by_one_present_member_or_by_the_exit_of_all():
    epoch = Epoch(4, tuple(LIVES[:2]))
    nobody: frozenset[rules.Incarnation] = frozenset()
    assert rules.uncovered([epoch], nobody, frozenset(LIVES[2:])) == epoch
    assert rules.uncovered([epoch], nobody, frozenset(LIVES[1:])) is None
    assert rules.uncovered([epoch], frozenset(LIVES[:1]), frozenset(LIVES[2:])) == epoch
    assert rules.uncovered([epoch], frozenset(LIVES[:2]), nobody) is None


def test_a_grant_is_in_ring_order_and_says_why():
    members = (Member(2, name(2), "behind"), Member(0, name(0), "contribute"))
    grant = rules.grant(7, 3, Base(at(1, 1), None, ()), members, 3, "first epoch")
    assert grant.ring == (2, 0)
    assert (grant.term, grant.epoch, grant.total) == (7, 3, 3)
    assert grant.reason == "first epoch"
    told = (*members, Member(1, name(1), "standby"))
    said = rules.describe(told, at(1, 1), "first epoch")
    assert "1 stand by; 2 behind" in said


def test_the_example_of_the_package_is_true() -> None:
    tried = doctest.testmod(quorum)
    assert tried.attempted > 0
    assert tried.failed == 0
