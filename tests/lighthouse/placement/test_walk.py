"""Random losses of ranks, agents, links and lighthouses: what placement says is true of the processes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from ft_hsdp.core.host_report import AssignedRanks, EndedRank, HostRanks, HostReport
from ft_hsdp.core.restart import RestartPolicy
from lighthouse.placement.machine import decide, refusal
from lighthouse.placement.signs import assigned, seen
from lighthouse.placement.state import PlacementPolicy, ReplicaPhase
from lighthouse.quorum.events import Event, HostClosed, ProcessesReported, Ticked
from lighthouse.quorum.state import LighthouseState, Policy, remembered

EVICT_S = 1.0
HOSTS = "abcde"


@dataclass
class Machine:
    """A machine with an agent: what it does is delayed by a link that may be cut."""

    name: str
    life: int = 0
    number: int = 0  # of its reports
    linked: bool = True
    seen: str = ""
    ended: dict[tuple[str, int], int] = field(default_factory=dict)
    held: dict[str, AssignedRanks] = field(default_factory=dict)

    def living(self) -> Iterator[tuple[str, int]]:
        for name, each in self.held.items():
            yield from ((name, rank) for rank in each.ranks if (name, rank) not in self.ended)

    def report(self) -> HostReport:
        living = set(self.living())
        self.number += 1
        ranks = []
        for name, each in self.held.items():
            mine = [(name, rank) for rank in each.ranks]
            ended = tuple(EndedRank(who[1], self.ended[who]) for who in mine if who in self.ended)
            ranks.append(HostRanks(name, tuple(who[1] for who in mine if who in living), ended))
        who = (self.name, f"{self.life:x}", self.name, self.number)
        return HostReport(*who, f"127.0.0.1:{40000 + self.life}", tuple(ranks), seen=self.seen)

    def obey(self, answer: tuple[AssignedRanks, ...], digest: str) -> None:
        names = {each.incarnation for each in answer}
        self.held = {name: each for name, each in self.held.items() if name in names}
        for each in answer:
            self.held.setdefault(each.incarnation, each)
        self.seen = digest

    def end(self) -> None:
        """All processes end, and the agent is started again at once."""
        self.life, self.held, self.ended, self.seen = self.life + 1, {}, {}, ""


class Walk:
    def __init__(self, seed: int, shrink_to: int | None) -> None:
        self.random = random.Random(seed)
        placing = PlacementPolicy(2, 2, RestartPolicy(10**6, 0.0), place_s=2.0, shrink_to=shrink_to)
        self.s = LighthouseState.empty(Policy(2, steps=100, evict_s=EVICT_S, placing=placing), term=1)
        self.now = 10.0
        self.machines = [Machine(name) for name in HOSTS]
        self.whole: set[str] = set()  # incarnations of which every rank was ever alive at once

    def apply(self, event: Event) -> None:
        self.s, _ = decide(self.s, event)
        self.check()

    def check(self) -> None:
        used = [name for me in self.s.placement.replicas if me.phase is not ReplicaPhase.RESTS for name in me.used]
        places = [name for me in self.s.placement.replicas for name in me.names if name]
        for names in (used, places):
            assert len(names) == len(set(names))  # else a host has ranks of two replicas
        living = {each for machine in self.machines for each in machine.living()}
        for _, name in self.s.exited:
            width = next((len(m.held[name].hosts) for m in self.machines if name in m.held), 0)
            alive = sum(who == name for who, _ in living)
            assert not width or alive < width, f"{name} has exited, and can still commit"

    def exchange(self, machine: Machine) -> None:
        if machine.linked:
            report = machine.report()
            if refusal(self.s, report):
                machine.end()
                return
            self.apply(ProcessesReported({}, frozenset(), frozenset(), self.now, host=report))
            machine.obey(assigned(self.s, machine.name), seen(self.s, machine.name))

    def step(self) -> None:
        pick, machine = self.random.random(), self.random.choice(self.machines)
        living = list(machine.living())
        if pick < 0.03 and living:
            machine.ended[self.random.choice(living)] = self.random.choice((-9, 75))
        elif pick < 0.04:
            machine.end()
        elif pick < 0.055:
            machine.linked = not machine.linked
            if not machine.linked and self.random.random() < 0.5:
                there = self.s.presence.host(machine.name)
                if there is not None:
                    self.apply(HostClosed(there.report, self.now))
        elif pick < 0.06:
            state = LighthouseState.empty(self.s.policy, self.s.term + 1)
            kept = {name: getattr(self.s, name) for name in ("placement", "exited", "lives")}
            self.s = remembered(replace(state, **kept))
            self.now = self.random.choice((5.0, self.now, 1e4))
        elif pick < 0.07:
            self.s = replace(self.s, drained=self.s.drained ^ {self.random.randrange(2)})
        elif pick < 0.8:
            self.exchange(machine)
        else:
            self.now += self.random.choice((0.01, 0.1, 0.5))
            self.apply(Ticked(self.now))

    def heal(self) -> None:
        self.s = replace(self.s, drained=frozenset())
        for machine in self.machines:
            machine.linked = True
        for _ in range(60):
            self.now += 0.1
            for machine in self.machines:
                self.exchange(machine)
            self.apply(Ticked(self.now))


@pytest.mark.parametrize("shrink_to", [None, 1])
@pytest.mark.parametrize("seed", range(6))
def test_no_incarnation_is_said_to_have_exited_that_can_commit_and_all_run_in_the_end(
    seed: int, shrink_to: int | None
) -> None:
    walk = Walk(seed, shrink_to)
    for _ in range(1000):
        walk.step()
    walk.heal()
    runs = {me.incarnation: me.used for me in walk.s.placement.replicas if me.phase is ReplicaPhase.RUNS}
    held = {name for machine in walk.machines for name in machine.held}
    assert (len(runs), held) == (2, runs.keys())
    assert walk.s.placement.shadows == ()
