"""Injected failures: pure code that decides which one is due, and describes it. `injection` carries it out."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ft_hsdp import fault_injection
from ft_hsdp.config import ChaosConfig
from ft_hsdp.config.chaos import MOMENTS


@dataclass(frozen=True, slots=True)
class Injection:
    """One failure that is due; fields without a comment are as in `ChaosConfig`."""

    replica: int | None  # None if the kind does not hit a replica
    rank: int | None  # None: all ranks of the replica, or those on `host`
    signal: str = "KILL"
    down_steps: int = 0
    for_s: float = 0.0  # it is lifted after so many seconds; 0: at the end of the job
    reason: str = "chaos by hand"  # of its event
    kind: str = "signal"
    target: str | None = None
    edge: tuple[int | str, ...] | None = None
    reject: bool = False
    host: str | None = None
    rule: int | None = field(default=None, compare=False)  # which rule of `chaos` asks for it; None: none does

    @property
    def event_kind(self) -> str:
        """Return the kind in its event: SIGKILL, partition."""
        return f"SIG{self.signal}" if self.kind == "signal" else self.kind

    @property
    def victim(self) -> str:
        """Return in words which processes are hit."""
        if self.edge is not None:
            one, other = (e if isinstance(e, str) else f"replica {e}" for e in self.edge)
            return f"{one} and {other}".replace(fault_injection.LIGHTHOUSE, "the lighthouse")
        if self.target == "agent":
            return f"the state agent of replica {self.replica}"
        if self.target is not None:
            return f"the {self.target.replace('_', ' ')}"
        if self.kind == fault_injection.HOST:
            where = f"host {self.host}" if self.host else f"the host of rank {self.rank}"
            return f"{where} of replica {self.replica}"
        return f"replica {self.replica}" + ("" if self.rank is None else f" rank {self.rank}")


def in_words(injection: Injection) -> str:
    """Return what happens, as one clause."""
    i, victim = injection, injection.victim
    clause = {
        "signal": f"{victim} gets SIG{i.signal}",
        "host": f"{victim}, its ranks and its state agent are lost",
        "helper": f"{victim} gets SIG{i.signal}",
        "partition": f"nothing passes between {victim}" + (", connections are refused" if i.reject else ""),
        "reset": f"the connections of {victim} to its neighbours are reset",
        "flip": f"a byte of a snapshot of replica {i.replica} flips",
    }[i.kind]
    return clause + (f" for {i.for_s:g} s" if i.for_s > 0 else "")


def injection_of(config: ChaosConfig, replica: int | None, any_rank: int, reason: str) -> Injection:
    """Return the injection that a rule asks for.

    Args:
        replica: The replica that it hits now; None if the kind does not hit a replica.
        any_rank: The rank that is hit if the kind hits one rank, and the rule names none.
    """
    c, rank = config, config.rank
    if rank is None and c.host is None and c.kind in ("signal", "host"):
        rank = any_rank
    made = Injection(replica, rank, c.signal, c.down_steps, c.for_s, reason, c.kind, c.target, c.edge)
    return replace(made, reject=c.reject, host=c.host)


@dataclass(slots=True)
class _Rule:
    """A rule of the configuration, and which of its failures are still to come."""

    config: ChaosConfig
    number: int  # its place in `chaos`
    random: random.Random
    waiting: list[int | None] = field(default_factory=list)  # of a rule that hits once: replicas that it must hit
    next_t: float | None = None  # of a rule with a rate: when the next failure is due

    @property
    def when(self) -> str:
        """When it is due, as the configuration says it."""
        return next(f"{key} {value:g}" for key in MOMENTS if (value := getattr(self.config, key)) is not None)

    def injection(self, replica: int | None, any_rank: int, reason: str) -> Injection:
        """Return the injection that the rule asks for now; the arguments are those of `injection_of`."""
        return replace(injection_of(self.config, replica, any_rank, reason), rule=self.number)


class Planner:
    """Decides which injections are due. It is deterministic: equal calls give equal answers."""

    def __init__(self, rules: Sequence[ChaosConfig], ranks: int, slots: int = 64) -> None:
        self._ranks = ranks
        self._slots = slots
        self._began: float | None = None  # time of the first call with a committed step
        self._rules = [_Rule(rule, n, random.Random(f"{rule.seed}/{n}")) for n, rule in enumerate(rules)]
        for rule in self._rules:
            rule.waiting = self._victims(rule.config) if rule.config.rate_per_min is None else []

    def due(self, committed: int, now: float, running: Collection[int]) -> list[Injection]:
        """Return the injections to make now. `at_s` and rates count from the first committed step.

        A replica that does not run cannot be hit: a rule that hits once waits for it, a rule with a rate skips it.

        Args:
            now: Time in seconds, from any origin.
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

    def idle(self, hit: Collection[int | None]) -> list[str]:
        """Return a line about each rule that has hit nothing.

        Args:
            hit: `Injection.rule` of all injections that hit something.
        """
        return [
            f"chaos.{rule.number} (kind {rule.config.kind}, {rule.when}) hit nothing"
            for rule in self._rules
            if rule.number not in hit
        ]

    def _victims(self, config: ChaosConfig) -> list[int | None]:
        """Return the replicas that a rule may hit; [None] if its kind does not hit a replica."""
        if config.replicas:
            return list(config.replicas)
        return [None] if config.host is None else list(range(self._slots))

    def _once(self, rule: _Rule, running: Collection[int], when: str, now: bool) -> list[Injection]:
        if not now:
            return []
        hit = [replica for replica in rule.waiting if replica is None or replica in running]
        # A host without named replicas is hit with all ranks that are there now, once.
        everyone = hit and rule.config.host is not None and not rule.config.replicas
        rule.waiting = [] if everyone else [replica for replica in rule.waiting if replica not in hit]
        return [rule.injection(replica, 0, f"chaos at {when}") for replica in hit]

    def _at_rate(self, rule: _Rule, now: float, running: Collection[int]) -> list[Injection]:
        rate = rule.config.rate_per_min
        assert rate is not None
        if rule.next_t is None:
            rule.next_t = now + rule.random.expovariate(rate / 60)
        found: list[Injection] = []
        while rule.next_t <= now:
            rule.next_t += rule.random.expovariate(rate / 60)
            replica = rule.random.choice(self._victims(rule.config))
            rank = rule.random.randrange(self._ranks)
            if (replica is None or replica in running) and all(i.replica != replica for i in found):
                found.append(rule.injection(replica, rank, f"chaos at {rate:g} a minute"))
        return found
