import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.core import events, state_id, voting
from ft_hsdp.core import replica as core
from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant
from ft_hsdp.core.replica_state import Phase, Replica, Step
from lighthouse.quorum import membership, rules, state, transition, witnesses
from lighthouse.quorum.transition import outlived
from tests.model import moves
from tests.model.explore import Exploration, explore
from tests.model.mutants import Mutant, broken
from tests.model.world import Bounds

NOTHING = {"deaths": 0, "pauses": 0, "restarts": 0}
SENTENCE = re.compile(r"(a link of |the )?(replica \d|lighthouse|grace|silent)( [^\s]+)+")


def bounds(**allowed: Any) -> Bounds:
    """Only what is named may go wrong."""
    return Bounds(**{**NOTHING, **allowed})


@pytest.mark.soak
def test_no_violation_in_the_whole_bounded_space(capsys: pytest.CaptureFixture[str]) -> None:
    space = Bounds()
    assert (space.replicas, space.steps, space.deaths, space.pauses, space.restarts) == (3, 2, 1, 1, 1)
    result = explore(space, limit_s=240)
    with capsys.disabled():
        print(f"\n3 replicas, 2 steps, 1 death, 1 pause, 1 lighthouse restart: {result}")
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states > 400_000


@pytest.mark.parametrize(
    ("space", "least"),
    [
        pytest.param(bounds(pauses=2, breaks=1), 80_000, marks=pytest.mark.soak),
        (bounds(restarts=1, lapses=1), 200),
        (bounds(wipes=1), 800),
        pytest.param(bounds(deaths=1, wipes=1), 150_000, marks=pytest.mark.soak),
        pytest.param(bounds(deaths=1, late_tokens=True), 40_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, steps=3, pauses=2, breaks=2, lapses=1), 80_000, marks=pytest.mark.soak),
        pytest.param(bounds(deaths=1, steps=3), 50_000, marks=pytest.mark.soak),
        pytest.param(bounds(pauses=2, breaks=2, steps=1), 200_000, marks=pytest.mark.soak),
        (bounds(deaths=1, breaks=1, replicas=2, late_tokens=True), 20_000),
        (bounds(deaths=1, recovery=True, steps=1), 15_000),
        pytest.param(bounds(deaths=1, recovery=True), 30_000, marks=pytest.mark.proof),
        (bounds(replicas=2, deaths=2, recovery=True, steps=1), 5_000),
        pytest.param(bounds(replicas=2, deaths=2, recovery=True), 35_000, marks=pytest.mark.proof),
        (bounds(deaths=1, patient=True, steps=1), 10_000),
        pytest.param(bounds(deaths=1, patient=True), 15_000, marks=pytest.mark.proof),
        (bounds(flips=1, steps=1), 2_000),
        pytest.param(bounds(flips=1), 8_000, marks=pytest.mark.proof),
        (bounds(replicas=2, flips=1, breaks=1), 600),
        (bounds(drains=2), 900),
        (bounds(drains=1, restarts=1), 1_100),
        (bounds(drains=1, wipes=1), 4_000),
        (bounds(replicas=2, drains=1, breaks=1), 1_000),
        (bounds(drains=1, pauses=1), 500),
        (bounds(leaves=1), 6_500),
        (bounds(replicas=2, leaves=2), 2_000),
        (bounds(replicas=2, leaves=1, pauses=1, breaks=1), 10_000),
        (bounds(replicas=2, leaves=1, wipes=1), 3_000),
        (bounds(copies=1), 600),
        (bounds(replicas=2, copies=1, breaks=1), 2_000),
        (bounds(cut=(0, 1)), 2_000),
        (bounds(replicas=2, shortages=1), 4_000),
        (bounds(exiles=1), 1_000),
        (bounds(replicas=2, tears=1), 1_500),
        (bounds(replicas=1, steps=3, lapses=2, tears=1, doubles=1), 1_200),
        (bounds(replicas=2, deaths=1, restarts=1, min_replicas=2), 2_000),
        (bounds(replicas=2, deaths=1, recovery=True, min_replicas=2), 1_000),
        pytest.param(bounds(deaths=1, min_replicas=2), 25_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, deaths=2, min_replicas=2), 8_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, deaths=1, pauses=1, min_replicas=2), 900, marks=pytest.mark.soak),
        pytest.param(bounds(drains=1, deaths=1, min_replicas=2), 140_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=4, steps=1, cut=(0, 1)), 25_000, marks=pytest.mark.soak),
        pytest.param(bounds(copies=1, breaks=1, steps=1), 32_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, copies=1, deaths=1), 18_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, copies=1, pauses=1, breaks=1), 14_000, marks=pytest.mark.soak),
        (bounds(replicas=2, doubles=1), 1_000),
        pytest.param(bounds(replicas=2, doubles=1, restarts=1), 7_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, doubles=1, deaths=1), 65_000, marks=pytest.mark.soak),
        pytest.param(bounds(replicas=2, doubles=1, steps=3, breaks=1), 90_000, marks=pytest.mark.soak),
        pytest.param(bounds(doubles=1, steps=1), 6_500, marks=pytest.mark.soak),
        pytest.param(bounds(leaves=1, drains=1), 31_000, marks=pytest.mark.soak),
        pytest.param(bounds(leaves=1, restarts=1), 21_000, marks=pytest.mark.soak),
        pytest.param(bounds(drains=1, deaths=1), 110_000, marks=pytest.mark.soak),
        pytest.param(bounds(drains=1, deaths=1, recovery=True), 140_000, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_no_violation_in_other_spaces(space: Bounds, least: int) -> None:
    result = explore(space, limit_s=240)
    assert not result.violation, str(result)
    assert result.exhausted
    assert result.states >= least


@pytest.mark.parametrize(
    "space",
    [bounds(restarts=1, lapses=1), bounds(wipes=1), bounds(replicas=2, steps=1, pauses=1, breaks=1)],
    ids=str,
)
def test_no_violation_if_epochs_that_are_alike_are_merged_at_once(space: Bounds) -> None:
    with broken((rules, "EPOCHS", 0)):
        result = explore(space, limit_s=240)
    assert not result.violation, str(result)
    assert result.exhausted


def test_the_transcript_is_the_shortest_way() -> None:
    with broken((core, "token_arrived", _ignore_it)):
        result = explore(bounds())
    assert result.violation.startswith("stuck")
    assert not result.exhausted
    assert result.transcript[-1].endswith("pass 1 yes")
    assert len(result.transcript) == 5


def _ignore_it(s: Replica, token: object) -> Step:
    return s, ()


def test_without_time_nothing_is_claimed() -> None:
    result = explore(Bounds(), limit_s=0)
    assert not result.exhausted
    assert "stopped early" in str(result)


# Each rule is there because the world breaks without it.


def _step_only(a: state_id.StateId, b: state_id.StateId) -> bool:
    return a.step == b.step


def _higher_step(a: state_id.StateId, b: state_id.StateId) -> bool:
    return a.step > b.step


def _never(*_: object) -> bool:
    return False


def _always(*_: object) -> bool:
    return True


def _of_any_attempt(
    token_arrived: Callable[[Replica, CommitToken], Step],
) -> Callable[[Replica, CommitToken], Step]:
    return lambda s, token: token_arrived(s, replace(token, fence=s.fence))


def _nobody(*_: object) -> None:
    return None


def _adopt_whatever(adopt: Callable[[Replica, Grant], Step]) -> Callable[[Replica, Grant], Step]:
    """Being ahead of a grant is never noticed."""

    def mutant(s: Replica, grant: Grant) -> Step:
        with broken((state_id, "newer", _never)):
            return adopt(s, grant)

    return mutant


def _forget_the_yes(broken: Callable[..., Step]) -> Callable[..., Step]:
    """Whoever passed on a yes calls its attempt void all the same."""

    def mutant(s: Replica, *why: Any, **who: Any) -> Step:
        return broken(replace(s, forwarded=False), *why, **who)

    return mutant


def _silence_is_death(form: Callable[..., state.Step]) -> Callable[..., state.Step]:
    """Whoever is silent beyond its grace counts as gone."""

    def mutant(s: state.LighthouseState, asks: Any, silent: Any, *others: Any) -> state.Step:
        gone = {(r, incarnation) for r, incarnation in silent if incarnation is not None}
        return form(replace(s, exited=s.exited | gone), asks, silent, *others[:-1], False)

    return mutant


def _leave_at_once(decide: Callable[..., Step]) -> Callable[..., Step]:
    """Whoever is asked to leave goes with the next verdict, whatever it said with its vote."""

    def mutant(s: Replica, token: CommitToken, passed: Any) -> Step:
        return decide(s, replace(token, leaving=(*token.leaving, s.me)) if s.departing else token, passed)

    return mutant


def _no_digest(reduced: Callable[..., Step]) -> Callable[..., Step]:
    """The ranks give no digest of the state that they hold."""

    def mutant(s: Replica, fence: Any, record: Any, digest: str) -> Step:
        return reduced(s, fence, record, "")

    return mutant


def _impatient(form: Callable[..., state.Step]) -> Callable[..., state.Step]:
    """Whoever has exited is taken to come back with nothing."""

    def mutant(s: state.LighthouseState, *round_: Any) -> state.Step:
        return form(s, *round_[:-1], False)

    return mutant


def _in_no_epoch_is_newer(
    admit: Callable[..., state.LighthouseState | str],
) -> Callable[..., state.LighthouseState | str]:
    """Whoever asks is newer if no epoch that is remembered names it, and it is no earlier life of the same run."""

    def mutant(s: state.LighthouseState, who: tuple[int, str], report: Any = None) -> state.LighthouseState | str:
        known = s.views[who[0]].incarnation
        if report is None or known is None:
            return admit(s, who, report)
        if all(who not in e.members for e in s.epochs) and not outlived(who, [(who[0], known)]):
            return s
        return "fenced: there is a newer incarnation"

    return mutant


def _whoever_runs_is_newest(
    admit: Callable[..., state.LighthouseState | str],
) -> Callable[..., state.LighthouseState | str]:
    """Of two supervisors the one that spoke last says which life counts."""

    def mutant(s: state.LighthouseState, who: tuple[int, str], report: Any = None) -> state.LighthouseState | str:
        if report is None:
            others = tuple(n for n in s.lives if (n.replica, n.incarnation) != who)
            return replace(
                s, lives=(*others, rules.AdmittedIncarnation(*who, 1 + max((n.number for n in others), default=0)))
            )
        return admit(s, who, report)

    return mutant


def _whoever_is_left(form: Callable[..., state.Step]) -> Callable[..., state.Step]:
    """A new epoch needs one contributor."""

    def mutant(s: state.LighthouseState, *round_: Any) -> state.Step:
        return form(replace(s, policy=replace(s.policy, min_replicas=1)), *round_)

    return mutant


def _count_nothing(edges: Any, *_: Any) -> Any:
    """Failures of edges are not counted."""
    return edges, ()


def _blame_the_neighbour(model: Any, w: Any, r: int, me: Replica) -> Iterator[moves.Move]:
    """A process that cannot connect calls it its right neighbour's fault, and asks again."""
    if me.phase is Phase.REDUCING and me.grant is not None and me.intact:
        ring = me.grant.ring
        right = ring[(ring.index(me.me) + 1) % len(ring)]
        lost = events.RingBroken(me.grant.epoch, right, me.me)
        yield f"replica {me.me} cannot connect to replica {right}", lambda: model.tell(w, r, lost)


def _ignore_the_misfit(s: Replica, why: str) -> Step:
    """An answer that does not fit is no answer."""
    return s, ()


KINDS = (
    *("agreement: ", "exactly once: ", "lost commit: ", "two histories: ", "stuck: ", "the head went back"),
    *("given up: ", "corrupt: ", "unsaid: ", "identity: ", "idle: ", "trapped: ", "storm: ", "accused: "),
    *("too few: ", "other weights: "),
)
LINK = bounds(pauses=1, breaks=1)
PAIR = bounds(replicas=2, steps=3, pauses=2, breaks=2, lapses=1)
MUTANTS: dict[str, Mutant] = {
    "step numbers instead of lineage": Mutant.of(
        "agreement: ", LINK, (state_id, "same", _step_only), (state_id, "newer", _higher_step)
    ),
    "one step is one state": Mutant.of("agreement: ", LINK, (state_id, "same", _step_only)),
    "cursors of one's own": Mutant.of(
        "exactly once: ", bounds(replicas=2, deaths=1, steps=3, replicated_cursors=False)
    ),
    "tokens without a fence": Mutant.of(
        "stuck: ",
        bounds(deaths=1, late_tokens=True),
        (core, "token_arrived", _of_any_attempt(voting.token_arrived)),
    ),
    "tokens without a fence, safety": Mutant.of(
        "lost commit: ",
        bounds(replicas=2, deaths=1, breaks=1, late_tokens=True),
        (core, "token_arrived", _of_any_attempt(voting.token_arrived)),
        liveness=False,
    ),
    "prepared records are dropped": Mutant.of("two histories: ", LINK, (Replica, "prepared", property(_nobody))),
    "a yes is forgotten": Mutant.of(
        "two histories: ", LINK, (core, "break_ring", _forget_the_yes(voting.break_ring))
    ),
    "everything is void": Mutant.of("two histories: ", LINK, (core, "void", _always), (rules, "void", _always)),
    "silence is death": Mutant.of(
        "", PAIR, (membership, "_grant_or_wait", _silence_is_death(membership._grant_or_wait))
    ),
    "no overlap with other epochs": Mutant.of("", PAIR, (rules, "uncovered", _nobody)),
    "states are not compared": Mutant.of(
        "corrupt: ", bounds(flips=1), (core, "reduced", _no_digest(voting.reduced))
    ),
    "leaves are not announced": Mutant.of(
        "unsaid: ", bounds(replicas=2, leaves=1), (voting, "_decide", _leave_at_once(voting._decide))
    ),
    "nobody comes back": Mutant.of(
        "given up: ",
        bounds(replicas=2, deaths=2, recovery=True),
        (membership, "_grant_or_wait", _impatient(membership._grant_or_wait)),
    ),
    "whoever is in no remembered epoch is newer": Mutant.of(
        "identity: ",
        bounds(replicas=2, doubles=1, steps=3, breaks=1),
        (transition, "admit", _in_no_epoch_is_newer(transition.admit)),
    ),
    "the last word of two supervisors counts": Mutant.of(
        "identity: ",
        bounds(replicas=2, doubles=1),
        (transition, "admit", _whoever_runs_is_newest(transition.admit)),
    ),
    "an older store is believed, and answers that do not fit are ignored": Mutant.of(
        "idle: ",
        bounds(replicas=2, copies=1, breaks=1),
        (transition, "store_behind", _never),
        (core, "ask_again", _ignore_the_misfit),
    ),
    "a local error counts as the neighbour's": Mutant.of(
        "storm: ",
        bounds(replicas=2, shortages=1, steps=1),
        (membership, "record_failures", _count_nothing),
        (moves, "_exhausted", _blame_the_neighbour),
    ),
    "failed edges are not counted": Mutant.of(
        "storm: ", bounds(replicas=2, cut=(0, 1)), (membership, "record_failures", _count_nothing)
    ),
    "whoever is left out is let in at once": Mutant.of(
        "storm: ", bounds(replicas=2, cut=(0, 1)), (rules.Edges, "excluded", lambda *_: frozenset())
    ),
    "a lease ends without a word": Mutant.of(
        "accused: ", bounds(replicas=2, exiles=1), (core, "_lease_ended", lambda s: (s, ()))
    ),
    "the head is not remembered": Mutant.of(
        "identity: ",
        bounds(replicas=2, deaths=1),
        *((where, "raise_head", lambda s, _: s) for where in (witnesses, membership)),
    ),
    "an empty store begins with whoever asks": Mutant.of(
        "",
        bounds(replicas=2, wipes=1, breaks=1),
        (membership, "_silent", lambda *_: []),
        (membership, "_unheard", lambda *_: []),
    ),
    "whoever is behind has to wait for a grant": Mutant.of(
        "stuck: ", bounds(replicas=2, deaths=1, min_replicas=2), (membership, "_catch_up", lambda s, *_: (s, ()))
    ),
    "too few go on": Mutant.of(
        "too few: ",
        bounds(replicas=2, deaths=1, min_replicas=2),
        (membership, "_grant_or_wait", _whoever_is_left(membership._grant_or_wait)),
    ),
    "stale grants are adopted": Mutant.of(
        "", replace(PAIR, breaks=1), (core, "_adopt", _adopt_whatever(core._adopt))
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_there_is_a_counter_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mutant = MUTANTS[name]
    with broken(*mutant.patches):
        result = explore(mutant.space, limit_s=240, liveness=mutant.liveness)
    with capsys.disabled():
        print(f"\n{name}: {result}")
    _is_readable(result)
    assert result.violation.startswith(mutant.kind)


def _is_readable(result: Exploration) -> None:
    assert result.violation, "no counter-example"
    assert len(result.transcript) >= 3
    for line in result.transcript:
        assert SENTENCE.fullmatch(line), line
    assert result.violation.startswith(KINDS)
    assert f"{len(result.transcript):3d}. {result.transcript[-1]}" in str(result)
