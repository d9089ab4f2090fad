"""Edges: failed connections between members that live are counted, go round, and cost one member at most."""

import itertools
from dataclasses import replace

import pytest

from ft_hsdp.core.grant import Continue, Member
from lighthouse.quorum.rules import arrange, neighbours
from tests.support.lighthouse.lighthouse_helpers import Script, at, name

LIMIT_S = 30.0


class Linked(Script):
    """Members of which some cannot connect to each other; a ring that does not form fails after ``connect_s``."""

    def __init__(self, total, *bad, connect_s=0.0, **policy):
        super().__init__(total=total, **policy)
        self.bad = {tuple(sorted(pair)) for pair in bad}
        self.connect_s = connect_s
        self.told = []
        self.epochs = 0
        self.first(*range(total))

    def feed(self, event):
        out = super().feed(event)
        self.told += [text for note, text in out.notes.items() if note == "EdgeBroken"]
        self.epochs += "EpochGranted" in out.notes
        return out

    @property
    def forms(self):
        return not neighbours(self.s.grant.ring) & self.bad

    def until_it_forms(self):
        """Let rings fail until one forms; the seconds that it took."""
        began = self.now
        while not self.forms:
            assert self.now < began + 600, self.told
            epoch, ring = self.s.epoch, self.s.grant.ring
            self.wait(self.connect_s)
            pair = next(
                (a, b) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True) if {*self.bad} & neighbours((a, b))
            )
            for r in ring:
                self.ask(r, self.base, epoch=epoch, after=epoch, edge=pair, suspects=(pair[1],))
            while self.s.epoch == epoch:
                self.wait(0.05)
        return self.now - began

    @property
    def base(self):
        return self.s.grant.base

    def commit(self):
        """The members commit a step, and ask for the next one."""
        grant = self.s.grant
        step = (self.s.head.step if self.s.head else 0) + 1
        return [self.ask(r, at(grant.epoch, step), epoch=grant.epoch, equal=grant.ring) for r in grant.ring]


def test_a_pair_that_cannot_connect_is_put_apart_in_a_ring_of_four():
    job = Linked(4, (0, 1))
    assert job.until_it_forms() < 1
    assert job.s.grant.ring == (0, 2, 1, 3)
    assert len(job.told) == 1
    job.commit()
    assert job.s.edges.avoided == {(0, 1)}, "a step over other edges says nothing about this one"


@pytest.mark.parametrize("connect_s", [0.0, 5.0])
@pytest.mark.parametrize("total", [2, 3])
def test_one_of_the_two_is_left_out_where_they_cannot_be_put_apart(total, connect_s):
    job = Linked(total, (0, 1), connect_s=connect_s)
    assert job.until_it_forms() <= LIMIT_S
    assert job.s.grant.ring == tuple(r for r in range(total) if r != 1)
    (told,) = job.told
    assert "left out for 30 s" in told
    assert job.epochs <= 5
    assert isinstance(job.commit()[0].answers[0], Continue)


def test_the_one_that_more_edges_blame_is_left_out():
    job = Linked(3, (0, 1), (0, 2))
    job.until_it_forms()
    assert job.s.grant.ring == (1, 2)


def test_it_is_tried_again_after_pauses_that_grow_and_stays_once_it_connects():
    job = Linked(3, (0, 1))
    job.until_it_forms()
    for pause_s in (30.0, 60.0, 120.0):
        job.ask(1)
        job.wait(pause_s - 0.5)
        job.commit()
        assert job.s.grant.ring == (0, 2), "too early"
        job.wait(0.6)
        job.commit()
        assert job.s.grant.ring == (0, 1, 2)
        if pause_s < 120:
            job.until_it_forms()
    job.bad.clear()
    job.commit()
    job.runs({2: 1}, [(2, 0)])
    job.commit()
    assert not job.s.edges.failures
    assert not job.s.edges.barred


def restarted(job):
    """The lighthouse ends, and another one has its store and another clock; the members ask it again."""
    job.restart()
    job.now = 0.0
    job.commit()


def test_the_pauses_go_on_when_the_lighthouse_is_restarted():
    """The one that is left out is tried once, at the cost of one ring, and is left out for twice as long."""
    job = Linked(3, (0, 1))
    job.until_it_forms()
    for pause_s in (60.0, 120.0):
        restarted(job)
        job.ask(1)
        job.commit()
        assert job.s.grant.ring == (0, 1, 2), "it is tried at once"
        epoch = job.s.epoch
        job.until_it_forms()
        assert job.s.epoch == epoch + 1
        assert job.s.grant.ring == (0, 2)
        assert f"left out for {pause_s:g} s" in job.told[-1]
        assert isinstance(job.commit()[0].answers[0], Continue), "training goes on"


def test_a_pair_stays_apart_when_the_lighthouse_is_restarted():
    job = Linked(4, (0, 1))
    job.until_it_forms()
    restarted(job)
    job.runs({3: 1}, [(3, 0)])
    job.ask(3, life=1)
    job.commit()
    assert job.s.grant.ring == (0, 2, 1, 3)
    assert job.forms


def test_nobody_is_left_out_below_min_replicas():
    job = Linked(3, (0, 1), min_replicas=3)
    with pytest.raises(AssertionError):
        job.until_it_forms()
    assert len(job.told) == 1
    assert job.s.grant.ring == (0, 1, 2)
    assert job.epochs < 600 / 5 + 12


def test_who_is_left_out_is_taken_back_if_the_others_are_gone():
    job = Linked(3, (0, 1))
    job.until_it_forms()
    job.ask(1)
    job.runs({0: None, 2: None}, [(0, 0), (2, 0)], lost=[0, 2])
    assert job.s.grant.ring == (1,)


def test_a_member_that_is_gone_or_of_another_epoch_is_no_failed_edge():
    job = Script()
    job.first(0, 1, 2)
    for life in range(1, 7):
        job.runs({1: life}, [(1, life - 1)])
        job.ask(1, life=life)
        epoch = job.s.epoch
        job.ask(0, epoch=epoch, after=epoch, edge=(0, 1))
        job.ask(2, epoch=epoch, after=epoch, edge=(2, 1))
        assert job.s.grant.member(1, name(1, life))
    assert not job.s.edges.failures


def test_epochs_without_a_step_come_slower_and_slower():
    job = Script(total=2)
    job.first(0, 1)
    at_s = []
    while len(at_s) < 12:
        epoch = job.s.epoch
        for r in (0, 1):
            job.ask(r, epoch=epoch, after=epoch)
        while job.s.epoch == epoch:
            job.wait(0.05)
        at_s.append(job.now)
    pauses = [b - a for a, b in itertools.pairwise(at_s)]
    assert at_s[0] == pauses[0] == 0.0, "the first two come at once"
    assert pauses == sorted(pauses)
    assert 4.9 < pauses[-1] < 5.1


def test_an_outage_may_cost_any_number_of_epochs():
    """An epoch every 5 s for days: the pause is no power of 2 that no float holds."""
    job = Script(total=2)
    job.first(0, 1)
    job.s = replace(job.s, fruitless=10**5)
    epoch = job.s.epoch
    for r in (0, 1):
        job.ask(r, epoch=epoch, after=epoch)
    job.wait(4.9)
    assert job.s.epoch == epoch
    job.wait(0.2)
    assert job.s.epoch == epoch + 1


@pytest.mark.parametrize("zones", [1, 2, 3, 5])
def test_a_ring_crosses_each_border_of_zones_once_also_round_a_bad_pair(zones):
    """Replicas are dealt out to zones in turns, as a scheduler may; the second host of each stands in a rack."""

    def member(r):
        zone = "abcde"[r % zones]
        return Member(r, name(r), "contribute", hosts=((f"{zone}//h{r}", 2), (f"{zone}/{r % 2}/g{r}", 2)))

    def crossings(ring):
        return sum(a % zones != b % zones for a, b in itertools.pairwise((*ring, ring[0])))

    members = [member(r) for r in range(4 * zones)]
    ring = [m.replica for m in arrange(members, frozenset())]
    assert crossings(ring) == (zones if zones > 1 else 0)
    assert all(a % 2 == b % 2 for a, b in zip(ring[::2], ring[1::2], strict=True)), "two of each rack"
    for a, b in itertools.pairwise(ring[:4]):  # in one zone
        bad = frozenset({(min(a, b), max(a, b))})
        around = [m.replica for m in arrange(members, bad)]
        assert not neighbours(tuple(around)) & bad
        assert crossings(around) <= crossings(ring) + (0 if zones < 2 else 2)


@pytest.mark.parametrize("size", [4, 5, 8, 40])
def test_rings_go_round_bad_pairs(size):
    members = [Member(r, name(r), "contribute") for r in range(size)]
    assert [m.replica for m in arrange(reversed(members), frozenset())] == list(range(size))
    for pair in itertools.combinations(range(min(size, 8)), 2):
        bad = frozenset({pair})
        ring = tuple(m.replica for m in arrange(members, bad))
        assert sorted(ring) == list(range(size))
        assert not neighbours(ring) & bad
