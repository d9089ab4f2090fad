"""What is remembered of the dead: enough for every decision, and never more for a longer job."""

from __future__ import annotations

import random

from ft_hsdp.core.grant import Continue, Refused
from lighthouse.quorum.rules import EPOCHS, Epoch, merged, uncovered
from lighthouse.quorum.state import ProcessesReported
from lighthouse.quorum.transition import outlived, run_of
from tests.support.lighthouse.lighthouse_helpers import START, Script, at, name, record


def test_an_incarnation_is_named_after_its_run_and_its_restarts() -> None:
    assert run_of("0-ab-cd-12") == ("ab-cd", 12)
    assert run_of("0-abc") == ("abc", 0)
    assert run_of("0-run-²") == ("0-run-²", 0)


def test_a_later_life_of_the_same_run_says_that_this_one_is_over() -> None:
    assert outlived((0, "0-a-2"), [(0, "0-a-3")])
    assert outlived((0, "0-a-9"), [(0, "0-a-10")])
    assert not outlived((0, "0-a-3"), [(0, "0-a-3"), (0, "0-a-2"), (0, "0-b-4"), (1, "0-a-4")])


def test_a_crash_loop_leaves_one_exit() -> None:
    job = Script(total=2)
    job.first(0)
    for life in range(500):
        out = job.runs({1: life + 1}, [(1, life)])
        assert "ExitReported" in out.notes
        assert len(job.s.exited) <= 1
    assert job.s.exited == {(1, name(1, 499))}


def test_exits_that_are_named_again_are_no_news() -> None:
    job = Script(total=2)
    job.first(0)
    job.runs({1: 2}, [(1, 0), (1, 1)])
    before = job.s
    assert not job.runs({1: 2}, [(1, 0), (1, 1)]).notes, "a rank names all lives before its own"
    assert not job.runs({1: 2}, [(1, 1)]).notes
    assert job.s == before, "patience with those who may come back starts with news only"


def test_exits_of_members_are_kept_while_their_epoch_is_remembered() -> None:
    job = Script(total=2)
    job.first(0, 1)
    job.runs({1: 5}, [(1, 4)])
    assert (1, name(1, 0)) in job.s.exited, "a later life has exited, so the member has"
    for step in (1, 2, 3, 4):
        job.ask(0, at(job.s.epoch, step), epoch=job.s.epoch)
    assert all((1, name(1, 0)) not in e.members for e in job.s.epochs)
    job.runs({1: 6}, [(1, 5)])
    assert job.s.exited == {(1, name(1, 5))}


def test_the_exits_of_a_run_that_nobody_names_are_forgotten() -> None:
    job = Script(total=1)
    for run in range(100):
        job.feed(ProcessesReported({0: f"0-r{run}-0"}, frozenset(), frozenset(), 0.0))
        job.feed(ProcessesReported({0: None}, frozenset({(0, f"0-r{run}-0")}), frozenset(), 0.0))
        assert len(job.s.exited) == 1


def test_a_supervisor_says_nothing_about_the_replicas_of_another_one() -> None:
    job = Script(total=2)
    job.runs({0: None}, [(0, 3)])
    job.runs({1: None}, [(1, 0)])
    assert job.s.exited == {(0, name(0, 3)), (1, name(1, 0))}


def test_a_forgotten_incarnation_that_asks_is_refused() -> None:
    job = Script(total=2)
    job.first(0)
    for life in range(5):
        job.runs({1: life + 1}, [(1, life)])
    assert (1, name(1, 2)) not in job.s.exited
    assert isinstance(job.ask(1, START, life=2).answers[1], Refused)
    assert job.s.views[1].incarnation == name(1, 5)
    job.s = Script(total=2).s
    job.runs({1: 5})
    assert isinstance(job.ask(1, START, life=2).answers[1], Refused), "nothing but what runs is known"
    job.s = Script(total=2).s
    job.runs({1: None}, [(1, 5)])
    assert isinstance(job.ask(1, START, life=2).answers[1], Refused), "nothing but the newest exit is known"


def test_one_of_a_forgotten_run_can_bring_nothing_back() -> None:
    """It was admitted before the incarnation of the new run, so it is refused, and changes nothing."""
    job = Script(total=2)
    job.first(0, 1)
    stale = record(START, 1)
    job.runs({1: None}, [(1, 0)])
    for step in (1, 2, 3, 4):
        job.ask(0, at(job.s.epoch, step), epoch=job.s.epoch)
    job.feed(ProcessesReported({1: "1-new-0"}, frozenset(), frozenset(), 0.0))
    assert (1, name(1, 0)) not in job.s.exited
    before = job.s
    assert isinstance(job.ask(1, START, prepared=stale).answers[1], Refused)
    assert job.s == before
    assert isinstance(job.ask(0, at(job.s.epoch, 5), epoch=job.s.epoch).answers[0], Continue)
    job.feed(ProcessesReported({1: "1-new-0"}, frozenset(), frozenset(), 0.0))
    assert job.s.views[1].incarnation == "1-new-0"


# Epochs.


def test_epochs_without_a_commit_do_not_pile_up() -> None:
    """A member crashes as soon as it is in the ring, for ever."""
    job = Script(total=3)
    job.first(0, 1, 2)
    for life in range(1, 2000):
        job.runs({2: life}, [(2, life - 1)])
        job.ask(2, life=life)
        job.ask(0, epoch=job.s.epoch, after=job.s.epoch)
        assert job.ask(1, epoch=job.s.epoch, after=job.s.epoch).grant(2).ring == (0, 1, 2)
        assert len(job.s.epochs) <= EPOCHS + 1
        assert len(job.s.exited) <= EPOCHS + 1
    assert job.s.epoch == 2000


def test_a_bad_link_makes_no_table_grow() -> None:
    job = Script(total=2)
    job.first(0, 1)
    for _ in range(500):
        for r in (0, 1):
            job.ask(r, epoch=job.s.epoch, after=job.s.epoch)
        job.wait(5.0)
    assert job.s.epoch == 501
    assert len(job.s.epochs) <= EPOCHS + 1


def test_what_is_merged_blocks_whom_it_blocked_before() -> None:
    """For any memberships and exits, now and after more exits: nobody gets past the epochs that are left out."""
    dice = random.Random(7)
    for _ in range(300):
        lives = [(r, f"{r}-a-{n}") for r in range(4) for n in range(3)]
        epochs = [
            Epoch(
                n,
                tuple(
                    sorted((r, f"{r}-a-{dice.randrange(3)}") for r in dice.sample(range(4), dice.randint(1, 4)))
                ),
            )
            for n in range(EPOCHS + 20)
        ]
        exited = frozenset(dice.sample(lives, dice.randint(0, 10)))
        kept = merged(epochs, exited)
        assert len(kept) < len(epochs)
        assert epochs[-1] in kept
        assert [e.number for e in kept] == sorted(e.number for e in kept)
        for _ in range(5):
            exited |= frozenset(dice.sample(lives, 2))
            living = [i for i in lives if i not in exited]
            present = frozenset(dice.sample(living, dice.randint(0, len(living))))
            returning = dice.randrange(4)
            for gone in (exited, frozenset(m for m in exited if m[0] != returning)):
                assert (uncovered(kept, gone, present) is None) == (uncovered(epochs, gone, present) is None)


def test_few_epochs_are_all_remembered() -> None:
    epochs = tuple(Epoch(n, ((0, "0-a-0"),)) for n in range(EPOCHS))
    assert merged(epochs, frozenset()) == epochs
