"""All contenders of one ring size, alive at once, so that one can be measured right after the other."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from ft_hsdp.bench.contenders.base import WorkerSeat
from ft_hsdp.bench.contenders.roster import MPIRUN, Contender
from ft_hsdp.bench.results import check_memory
from ft_hsdp.bench.scope import Scope
from ft_hsdp.bench.workers.link import Forks, WorkerLink, collect
from ft_hsdp.bench.workers.team import Team, start_mpi

STORE = Contender("ft_hsdp.bench.contenders.allreduce:StoreHost", "the store")


class WorkerArena(Scope):
    """A context: on entry every contender has `members` workers in one ring; on exit nothing is left running.

    teams: by name; bystander: a process outside all rings. Raises Retryable if a worker cannot be set up.
    """

    def __init__(self, contenders: Mapping[str, Contender], members: int) -> None:
        self.contenders = dict(contenders)
        self.members = members
        self.teams: dict[str, Team] = {}
        self._token = secrets.token_hex(32)
        self._store = ""

    def _begin(self, stack: ExitStack, folder: Path) -> None:
        entries = [STORE.entry, *(c.entry for c in self.contenders.values() if c.entry != MPIRUN)]
        self._forks = Forks(sorted({entry.partition(":")[0] for entry in entries}), folder)
        stack.callback(self._forks.close)
        self.bystander = Team(
            "bystander", [self._forks.fork("bystander", STORE.entry, self._seat("store", STORE, 0))]
        )
        stack.callback(self.bystander.close)
        _greet(self.bystander.links)
        self._store = self.bystander.links[0].address
        for name, contender in self.contenders.items():
            self._start(name, contender, folder, stack)
        for team in self.teams.values():
            team.join()

    def prepare(self, size: int) -> None:
        """Allocate `size` bytes everywhere; see that every sum is right. Raises ConfigError, DataCorruption."""
        check_memory(self.contenders.values(), self.members, size)
        for team in self.teams.values():
            team.prepare(size)
            team.check()

    def replace(self, name: str, member: int) -> None:
        """A fresh worker in the place of one that was killed; it is not in the ring yet."""
        team = self.teams[name]
        team.links[member].close()
        team.links[member] = self._fork(name, member)
        _greet([team.links[member]])

    def _start(self, name: str, contender: Contender, folder: Path, stack: ExitStack) -> None:
        if contender.entry == MPIRUN:
            links = start_mpi(self._seat(name, contender, 0), self.members, folder, stack)
            self.teams[name] = Team(name, links)
            return
        team = self.teams[name] = Team(name, [])
        stack.callback(team.close)
        for member in range(self.members):
            team.add(self._fork(name, member))
        _greet(team.links)

    def _fork(self, name: str, member: int) -> WorkerLink:
        contender = self.contenders[name]
        return self._forks.fork(f"{name} rank {member}", contender.entry, self._seat(name, contender, member))

    def _seat(self, name: str, contender: Contender, member: int) -> WorkerSeat:
        return WorkerSeat(name, member, self._store, self._token, contender.options)


def _greet(links: list[WorkerLink]) -> None:
    for link, answer in zip(links, collect(links), strict=True):
        link.greet(answer)
