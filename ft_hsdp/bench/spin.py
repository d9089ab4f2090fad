"""What a thread of pure Python in a rank's process costs its all-reduce.

Beside it the same thread in a process of its own: that is what the loss of a core costs, whoever takes it; the
rest is the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ft_hsdp.bench.arena import Arena
from ft_hsdp.bench.options import MIB, size_name
from ft_hsdp.bench.plan import Log, Measure, Plan, Row
from ft_hsdp.bench.roster import Contender
from ft_hsdp.bench.rounds import batch, interleave
from ft_hsdp.bench.spread import ratio, spread
from ft_hsdp.bench.team import Team

MEMBERS = (2,)
SIZES = (64 * MIB,)
CONTENDERS = ("tcp", "shm", "gloo")
MODES = ("idle", "thread", "process")


def spin(contenders: Mapping[str, Contender], plan: Plan, log: Log) -> list[Row]:
    """A row for each contender, ring size and message size: its time in each mode, and the speed that is left."""
    rows = []
    for members in plan.members:
        with Arena(contenders, members) as arena:
            for size in plan.sizes:
                for row in _size(arena, size, plan.rounds):
                    rows.append(row)
                    left = ", ".join(f"{mode} {share:.2f}" for mode, share in row["share_of_idle"].items())
                    log.say(f"{row['contender']}, {members} members, {size_name(size)}, speed left: {left}")
    return rows


def _size(arena: Arena, size: int, rounds: int) -> list[Row]:
    teams = list(arena.teams.values())
    arena.prepare(size)
    samples = {
        (team.name, mode): partial(_sample, team, spinner, batch(size))
        for team in teams
        for mode, spinner in (("idle", None), ("thread", team), ("process", arena.bystander))
    }
    seconds = interleave(samples, rounds)
    rows = []
    for team in teams:
        modes = {mode: spread(seconds[team.name, mode]) for mode in MODES}
        left = {mode: ratio(modes["idle"]["p50_ms"], modes[mode]["p50_ms"]) for mode in MODES[1:]}
        row = {"contender": team.name, "members": arena.members, "bytes": size, "modes": modes}
        rows.append({**row, "share_of_idle": left})
    return rows


def _sample(team: Team, spinner: Team | None, times: int) -> float:
    """Seconds of an all-reduce while the first process of `spinner` spins."""
    if spinner is None:
        return team.time(times)
    spinner.spin(True)
    seconds = team.time(times)
    spinner.spin(False)
    return seconds


SPIN = Measure(spin, MEMBERS, SIZES, CONTENDERS)
