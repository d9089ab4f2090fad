"""Failures on purpose: which one is due is decided by pure code; `inflict` carries it out."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ft_hsdp import fault_injection
from ft_hsdp.config import ChaosConfig


@dataclass(frozen=True, slots=True)
class Injection:
    """One failure that is due. It ends after `for_s` seconds; with 0 it lasts until the job ends.

    replica, rank: who is hit, where the kind hits a replica (rank None: all of its ranks, or those on `host`); the
    other fields as in `ChaosConfig`.
    """

    replica: int | None
    rank: int | None
    signal: str = "KILL"
    down_steps: int = 0
    for_s: float = 0.0
    reason: str = "chaos by hand"
    kind: str = "signal"
    target: str | None = None
    edge: tuple[int | str, ...] | None = None
    by_s: float = 3600.0
    delay_s: float = 0.2
    reject: bool = False
    host: str | None = None

    @property
    def named(self) -> str:
        """What the events call it: SIGKILL, disk_full."""
        return f"SIG{self.signal}" if self.kind == "signal" else self.kind

    @property
    def whom(self) -> str:
        """Who is hit, in words."""
        if self.edge is not None:
            one, other = (e if isinstance(e, str) else f"replica {e}" for e in self.edge)
            return f"{one} and {other}".replace(fault_injection.LIGHTHOUSE, "the lighthouse")
        if self.target == "agent":
            return f"the state agent of replica {self.replica}"
        if self.target is not None:
            return f"the {self.target.replace('_', ' ')}"
        return f"replica {self.replica}" + ("" if self.rank is None else f" rank {self.rank}")


def words(injection: Injection) -> str:
    """What happens, as one clause."""
    i, whom = injection, injection.whom
    clause = {
        "signal": f"{whom} gets SIG{i.signal}",
        "helper": f"{whom} gets SIG{i.signal}",
        "disk_full": f"the disk of {whom} is full",
        "slow_disk": f"each write of {whom} takes {i.delay_s:g} s",
        "descriptors": f"{whom} gets no more file descriptors",
        "memory": f"{whom} gets no more memory",
        "partition": f"nothing passes between {whom}" + (", connections are refused" if i.reject else ""),
        "garbage": f"strangers send garbage to {whom}",
        "flip": f"a byte of a snapshot of replica {i.replica} flips",
        "clock": f"the wall clock of {whom} jumps by {i.by_s:g} s",
    }[i.kind]
    return clause + (f" for {i.for_s:g} s" if i.for_s > 0 else "")


def one_rank(config: ChaosConfig) -> bool:
    """Whether it hits one rank of a replica."""
    return config.kind in ("signal", "descriptors", "memory", "garbage") and config.host is None


@dataclass(slots=True)
class _Rule:
    """A rule of the configuration and what of it is still to come."""

    config: ChaosConfig
    random: random.Random
    waiting: list[int | None] = field(default_factory=list)  # once: replicas that were not hit yet
    next_t: float | None = None  # rate_per_min: when the next one is due


class Planner:
    """Decides which injections are due. Deterministic: equal calls give equal answers."""

    def __init__(self, rules: Sequence[ChaosConfig], ranks: int, slots: int = 64) -> None:
        self._ranks = ranks
        self._slots = slots
        self._began: float | None = None  # when the first step was seen to be committed
        self._rules = [_Rule(rule, random.Random(f"{rule.seed}/{n}")) for n, rule in enumerate(rules)]
        for rule in self._rules:
            rule.waiting = self._victims(rule.config) if rule.config.rate_per_min is None else []

    def due(self, committed: int, now: float, running: Collection[int]) -> list[Injection]:
        """The injections to make at time `now` (seconds, any origin), with `committed` steps committed.

        A replica that does not run cannot be hit: a rule that hits once waits for it, one with a rate passes it
        over. The clock of `at_s` and of a rate starts with the first committed step.
        """
        if self._began is None and committed > 0:
            self._began = now
        found: list[Injection] = []
        for rule in self._rules:
            config = rule.config
            if config.rate_per_min is not None:
                found += self._at_rate(rule, now, running) if committed > 0 else []
            elif config.at_step is not None:
                found += self._once(rule, running, f"step {config.at_step}", committed + 1 >= config.at_step)
            elif config.at_s is not None:
                late = self._began is not None and now - self._began >= config.at_s
                found += self._once(rule, running, f"{config.at_s:g} s", late)
        return found

    def _victims(self, config: ChaosConfig) -> list[int | None]:
        """The replicas that a rule may hit; one None where it hits none in particular."""
        if config.replicas:
            return list(config.replicas)
        return [None] if config.host is None else list(range(self._slots))

    def _once(self, rule: _Rule, running: Collection[int], when: str, now: bool) -> list[Injection]:
        if not now:
            return []
        hit = [replica for replica in rule.waiting if replica is None or replica in running]
        rule.waiting = [] if rule.config.host else [replica for replica in rule.waiting if replica not in hit]
        rank = rule.config.rank if rule.config.rank is not None or not one_rank(rule.config) else 0
        return [self._injection(rule, replica, rank, f"chaos at {when}") for replica in hit]

    def _at_rate(self, rule: _Rule, now: float, running: Collection[int]) -> list[Injection]:
        rate = rule.config.rate_per_min
        assert rate is not None
        if rule.next_t is None:
            rule.next_t = now + rule.random.expovariate(rate / 60)
        found: list[Injection] = []
        while rule.next_t <= now:
            rule.next_t += rule.random.expovariate(rate / 60)
            replica = rule.random.choice(self._victims(rule.config))
            drawn: int | None = rule.random.randrange(self._ranks)
            if rule.config.rank is not None or not one_rank(rule.config):
                drawn = rule.config.rank
            if (replica is None or replica in running) and all(i.replica != replica for i in found):
                found.append(self._injection(rule, replica, drawn, f"chaos at {rate:g} a minute"))
        return found

    def _injection(self, rule: _Rule, replica: int | None, rank: int | None, reason: str) -> Injection:
        c = rule.config
        made = Injection(replica, rank, c.signal, c.down_steps, c.for_s, reason, c.kind, c.target, c.edge)
        return replace(made, by_s=c.by_s, delay_s=c.delay_s, reject=c.reject, host=c.host)
