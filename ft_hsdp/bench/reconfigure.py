"""Time to form a ring again under a new epoch: with the same order, and with every edge turned round."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ft_hsdp.bench.arena import Arena
from ft_hsdp.bench.options import KIB
from ft_hsdp.bench.plan import Log, Measure, Plan, Row
from ft_hsdp.bench.roster import Contender
from ft_hsdp.bench.rounds import interleave
from ft_hsdp.bench.spread import spread

MEMBERS = (4,)
CONTENDERS = ("tcp", "shm", "torchft")


def reconfigure(contenders: Mapping[str, Contender], plan: Plan, log: Log) -> list[Row]:
    """A row for each contender, ring size and kind of change: from a common start to the last that is ready."""
    rows = []
    for members in plan.members:
        with Arena(contenders, members) as arena:
            samples: dict[tuple[str, str], Callable[[], float]] = {}
            for name, team in arena.teams.items():
                samples[name, "same"] = team.join
                samples[name, "reversed"] = lambda team=team: team.join(team.order[::-1])  # type: ignore[misc]
            for (name, change), seconds in interleave(samples, plan.rounds).items():
                rows.append({"contender": name, "members": members, "change": change, **spread(seconds)})
                log.say(f"{name}, {members} members, {change} order: {rows[-1]['p50_ms']:.3g} ms")
            arena.prepare(4 * KIB)
    return rows


def _unfit(contender: Contender) -> str:
    return "" if contender.reconfigures else "it cannot be reconfigured"


RECONFIGURE = Measure(reconfigure, MEMBERS, (), CONTENDERS, _unfit)
