"""One member reports one wrong value: no other is lost, the job does not halt, and no false state is the head."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from ft_hsdp.core.grant import Report
from lighthouse.quorum import rules, state, transition, witnesses
from tests.model.explore import explore
from tests.model.lies import LIES
from tests.model.mutants import Mutant, broken
from tests.model.world import Bounds


def bounds(lie: str, **allowed: Any) -> Bounds:
    """Only what is named may go wrong."""
    return Bounds(**{"deaths": 0, "pauses": 0, "restarts": 0, "replicas": 2, "lies": 1, "lie": lie, **allowed})


QUICK = [
    *(bounds(lie, replicas=1) for lie in LIES if lie != "forged"),  # nobody else can know
    *(bounds(lie) for lie in LIES),
    bounds("far", replicas=3, steps=1),
    bounds("step", restarts=1, lapses=1),
]
AWAY = {"restarts": 1, "lapses": 1}
LONG = [
    *(bounds(lie, replicas=3) for lie in LIES),
    *(bounds(lie, replicas=n, **AWAY) for lie in ("lineage", "step", "far") for n in (1, 2, 3)),
    *(bounds(lie, **more) for lie in ("step", "far") for more in ({"lies": 2}, {"breaks": 1}, {"deaths": 1})),
    *(bounds(lie, wipes=1) for lie in ("step", "far")),
    bounds("far", replicas=3, steps=1, deaths=1),
    *(bounds(lie, replicas=3, steps=1, breaks=1) for lie in ("lineage", "forged")),
]


@pytest.mark.parametrize("space", [*QUICK, *(pytest.param(s, marks=pytest.mark.soak) for s in LONG)], ids=str)
def test_one_wrong_report_harms_no_other(space: Bounds) -> None:
    result = explore(space, limit_s=300)
    assert not result.violation, str(result)
    assert result.exhausted


# Each rule is there because the world breaks without it.


def _believe(s: state.LighthouseState, report: Report) -> state.Step:
    """Every state that is reported is the head if it is the newest."""
    return state.raise_head(s, report.state), ()


def _all_are_right(_: state.LighthouseState, reports: Mapping[int, Report], *__: Any) -> witnesses.Judgement:
    """Nothing that a round hears is judged."""
    return witnesses.Judgement(dict(reports), {})


def _asked_is_left(of: Callable[..., witnesses.Peers]) -> Callable[..., witnesses.Peers]:
    """Whoever asks is taken to have left the ring, also if the request is older than the step."""

    def mutant(s: state.LighthouseState, report: Report, reports: Mapping[int, Report], epoch: int) -> Any:
        ring = of(s, report, reports, epoch)
        return replace(ring, left=(*ring.left, *(reports[r] for r in ring.intact)), intact=())

    return mutant


def _says_so(_: state.LighthouseState, report: Report) -> bool:
    """One replica is enough to say that states differ."""
    return bool(report.diverged)


def _alone(s: state.LighthouseState, report: Report) -> bool:
    """The last one left is believed without the record of its state."""
    return s.grant is not None and not witnesses.others(s, report.replica, s.grant.epoch)


MUTANTS: dict[str, Mutant] = {
    "one report is the head": Mutant.of("false head: ", bounds("far"), (transition, "hear", _believe)),
    "one report is the base": Mutant.of(
        "false head: ", bounds("far", breaks=1), (witnesses, "judge", _all_are_right)
    ),
    "one record is the base": Mutant.of(
        "false head: ", bounds("record", breaks=1), (witnesses, "judge", _all_are_right)
    ),
    "a record on the head is denied by nobody": Mutant.of(
        "false head: ", bounds("forged", replicas=3, steps=1, breaks=1), (witnesses, "_denials", lambda *_: 0)
    ),
    "an old request contradicts": Mutant.of(
        "", bounds("far", breaks=1), (witnesses.Peers, "of", _asked_is_left(witnesses.Peers.of))
    ),
    "one report halts the job": Mutant.of("halted: ", bounds("diverged"), (transition, "agree", _says_so)),
    "the last one needs no record": Mutant.of(
        "false head: ", bounds("far", replicas=1), (witnesses, "alone", _alone)
    ),
    "one name of the first state is as good as another": Mutant.of(
        "false head: ",
        bounds("lineage", replicas=3, steps=1, breaks=1),
        (rules, "Counter", lambda states: dict.fromkeys(states, 1)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_without_the_rule_there_is_a_counter_example(name: str) -> None:
    mutant = MUTANTS[name]
    with broken(*mutant.patches):
        result = explore(mutant.space, limit_s=240)
    assert result.violation, "no counter-example"
    assert result.violation.startswith(mutant.kind), str(result)
    assert any("reports a wrong" in line for line in result.transcript), str(result)
