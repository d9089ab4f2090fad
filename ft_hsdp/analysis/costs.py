"""What failures cost: the models of the four papers, and what `launcher.py plan` assumes.

All times share one unit, which the caller chooses; rates are per that unit. A ratio is the part of the time in
which a job makes progress. Two readings of it are in use, and `effective_ratio` has both: "renewal" counts the
time between the end of one recovery and the next failure (DeadPool), "wall_clock" counts failures by the clock,
recoveries included (FT-HSDP, GEMINI).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

Reading = Literal["renewal", "wall_clock"]


def _assumed(default: float, text: str) -> float:
    value: float = field(default=default, metadata={"help": text})
    return value


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a configuration does not say. The defaults are of the papers where they say something."""

    host_failures_per_month: float = _assumed(
        0.192, "losses of one host: 6.4 per 1,000 hosts and day (docs/memory.md)"
    )
    replace_s: float = _assumed(600.0, "until a lost host is replaced, copies included; FT-HSDP: 600")
    swap_s: float = _assumed(40.0, "until a replica goes on from memory on another host; DeadPool: 40")
    restart_s: float = _assumed(150.0, "until a job goes on from a checkpoint; DeadPool: 150")
    step_s: float = _assumed(20.0, "of a step; FT-HSDP: 20")
    network_gbps: float = _assumed(100.0, "Gbit/s between two hosts")
    storage_gbps: float = _assumed(20.0, "Gbit/s of all hosts together to the checkpoints; GEMINI: 20")


ASSUMED = {each.name: each for each in fields(Assumptions)}


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def wasted_time(checkpoint: float, interval: float, retrieval: float) -> float:
    """Return the mean time that a failure wastes with periodic checkpoints (GEMINI §2.1, equation 1).

    Raises:
        ValueError: the interval is shorter than a checkpoint (equation 2).
    """
    if interval < checkpoint:
        raise ValueError(f"a checkpoint each {interval:g} is not possible: it takes {checkpoint:g}")
    return checkpoint + interval / 2 + retrieval


def restart_cost(restart: float, step: float, every: int) -> float:
    """Return the mean cost of a failure for a job that restarts from a checkpoint (DeadPool §IV).

    Args:
        restart: time until the job goes on from a checkpoint.
        step: time of one.
        every: steps between two checkpoints. On the average (every - 1) / 2 steps are repeated.
    """
    return restart + step * (every - 1) / 2


def swap_cost(swap: float, step: float, part: float) -> float:
    """Return the mean cost of a failure for a job that goes on from copies in memory (DeadPool §IV).

    Args:
        swap: time until the lost host is replaced.
        step: time of one.
        part: of a step that is lost, from 0 to 1.
    """
    return swap + step * part


def effective_ratio(between: float, cost: float, reading: Reading = "renewal") -> float:
    """Return the part of the time in which a job makes progress.

    Args:
        cost: mean time that a failure costs.
        reading: "renewal": `between` counts from the end of a recovery. "wall_clock": recoveries are inside of it;
            0 if failures come faster than recoveries end.
    """
    if reading == "renewal":
        return between / (between + cost)
    return max(0.0, 1 - cost / between)


@dataclass(frozen=True, slots=True)
class HostAway:
    """What a job loses while a host of one replica is away: the replica waits, or goes on with fewer ranks.

    Rates are units per time of the whole job. It is counted from the loss on; a step that is repeated counts for
    nothing, since both ways repeat it.
    """

    full: float  # rate with all ranks
    without: float  # rate while the replica is away
    narrow: float  # rate while it has fewer ranks
    patience: float  # time for which it waits for a host before it goes on with fewer ranks
    start: float  # time from a start of the replica until it trains, with fewer or with all ranks

    def lost_waiting(self, away: float) -> float:
        """Return the units that are lost if the replica waits for the host and starts once.

        Args:
            away: time until there is a host.
        """
        return (self.full - self.without) * (away + self.start)

    def lost_shrinking(self, away: float) -> float:
        """Return the units that are lost if the replica goes on with fewer ranks: it starts twice.

        Args:
            away: time until there is a host. Up to `patience` this is `lost_waiting`. A host that comes while the
                replica starts with fewer ranks is used after that start.
        """
        if away <= self.patience:
            return self.lost_waiting(away)
        trained = max(0.0, away - self.patience - self.start)
        return (self.full - self.without) * (self.patience + 2 * self.start) + (self.full - self.narrow) * trained

    @property
    def break_even(self) -> float | None:
        """Return after what time away fewer ranks lose fewer units than the wait; None: never.

        It is `patience` and one start, however many ranks are left: until then both ways have trained nothing,
        and later the fewer ranks have to make up for no more than the second start.
        """
        return self.patience + self.start if self.narrow > self.without else None
