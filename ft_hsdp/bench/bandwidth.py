"""Time of one all-reduce, every contender in turn, round after round (ABAB)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import psutil

from ft_hsdp.bench.arena import Arena
from ft_hsdp.bench.options import KIB, MIB, size_name
from ft_hsdp.bench.plan import Log, Measure, Plan, Row
from ft_hsdp.bench.roster import CONTENDERS, Contender
from ft_hsdp.bench.rounds import batch, interleave
from ft_hsdp.bench.spread import ratio, spread
from ft_hsdp.bench.team import Team

MEMBERS = (2, 4)
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
IDLE_S = 0.5  # how long they are watched
RESTLESS = 0.05  # of a core: more is noted


def bandwidth(contenders: Mapping[str, Contender], plan: Plan, log: Log) -> list[Row]:
    """A row for each ring size and message size; a note about each contender that does not rest."""
    rows = []
    for members in plan.members:
        with Arena(contenders, members) as arena:
            log.say(f"{members} members: {', '.join(arena.teams)}")
            for size in plan.sizes:
                rows.append(_size(arena, size, plan.rounds))
                log.say(f"{members} members, {size_name(size)}: {_medians(rows[-1])}")
            for name, share in _idle(arena).items():
                if share > RESTLESS:
                    log.note(f"{name} with {members} members used {share:.0%} of a core while it was idle")
    return rows


def _size(arena: Arena, size: int, rounds: int) -> Row:
    teams = list(arena.teams.values())
    arena.prepare(size)
    times = batch(size)
    seconds = interleave({team.name: partial(team.time, times) for team in teams}, rounds)
    found = {name: spread(values) for name, values in seconds.items()}
    return {
        "members": arena.members,
        "bytes": size,
        "rounds": rounds,
        "all_reduces_per_sample": times,
        "contenders": found,
        "times_as_fast": {name: _ratios(name, found) for name in found},
    }


def _ratios(name: str, found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How many times as fast as each other contender: ratios of medians."""
    own = found[name]["p50_ms"]
    return {other: ratio(times["p50_ms"], own) for other, times in found.items() if other != name}


def _idle(arena: Arena) -> dict[str, float]:
    """Cores that each contender uses while it has nothing to do: more than none slows the others down."""
    start, before = time.monotonic(), {name: _cpu_s(team) for name, team in arena.teams.items()}
    time.sleep(IDLE_S)
    took = time.monotonic() - start
    return {name: (_cpu_s(team) - before[name]) / took for name, team in arena.teams.items()}


def _cpu_s(team: Team) -> float:
    times = [psutil.Process(link.pid).cpu_times() for link in team.links]
    return sum(t.user + t.system for t in times)


def _medians(row: Row) -> str:
    return ", ".join(f"{name} {found['p50_ms']:.3g} ms" for name, found in row["contenders"].items())


BANDWIDTH = Measure(bandwidth, MEMBERS, SIZES, tuple(CONTENDERS))
