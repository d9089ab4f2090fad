"""The workers of all contenders of one ring size, alive at once, so that one is measured right after the other."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft_hsdp.bench.contenders.base import Contender, WorkerSpec
from ft_hsdp.bench.results import check_room
from ft_hsdp.bench.scope import Scope
from ft_hsdp.bench.workers.link import Answer, WorkerLink, ask, collect, greet, spawn_worker
from ft_hsdp.errors import DataCorruption, Retryable

STORE = Contender("ft_hsdp.bench.contenders.allreduce:StoreHost", "the store")
LEAD_S = 0.005  # from the command to the common start: every worker has read it by then


class WorkerRing:
    """A contender's workers and their ring."""

    def __init__(self, name: str, links: Iterable[WorkerLink]) -> None:
        self.name = name
        self.links = list(links)  # by member
        self.order = list(range(len(self.links)))  # the ring, clockwise
        self._epoch = 0

    @property
    def active(self) -> list[WorkerLink]:
        """Return the members of the ring, clockwise."""
        return [self.links[member] for member in self.order]

    def join(self, order: Sequence[int] | None = None) -> float:
        """Form a ring of these members under a new epoch.

        Returns:
            Seconds from a common start until all are ready.
        """
        self.order = list(self.order if order is None else order)
        start = time.monotonic() + LEAD_S
        return self.last(ask(self.active, {**self.membership("join"), "at": start})) - start

    def membership(self, what: str) -> dict[str, Any]:
        """Return the command to join the ring of `order` under a new epoch."""
        self._epoch += 1
        ring = [(member, self.links[member].address) for member in self.order]
        return {"do": what, "epoch": self._epoch, "ring": ring}

    def prepare(self, size: int) -> None:
        """Allocate for ``size`` bytes."""
        ask(self.active, {"do": "prepare", "bytes": size})

    def check(self) -> None:
        """Sum known values. Raises DataCorruption if a sum is wrong."""
        for link, answer in zip(self.active, ask(self.active, {"do": "check"}), strict=True):
            if wrong := answer.get("wrong"):
                raise DataCorruption(f"bench: {link.name} has a wrong sum: {wrong}")
            _complete(link, answer)

    def start(self, times: int = 1) -> float:
        """Begin so many all-reduces, one after the other; return the common start."""
        start = time.monotonic() + LEAD_S
        for link in self.active:
            link.send({"do": "run", "times": times, "at": start})
        return start

    def time(self, times: int = 1) -> float:
        """Return the seconds of an all-reduce: from a common start to the slowest rank's end, over ``times``."""
        start = self.start(times)
        return (self.last(collect(self.active)) - start) / times

    def last(self, answers: Sequence[Answer]) -> float:
        """Return the moment when the last member was done. Raises Retryable if one has failed."""
        for link, answer in zip(self.active, answers, strict=True):
            _complete(link, answer)
        return max(float(answer["t"]) for answer in answers)

    def close(self) -> None:
        """Kill the workers of the ring."""
        for link in self.links:
            link.close()


def _complete(link: WorkerLink, answer: Answer) -> None:
    """Raise Retryable where an undisturbed all-reduce failed."""
    if "raised" in answer:
        raise Retryable(f"bench: {link.name} raised {answer['raised']}: {answer['text']}")


class WorkerRings(Scope):
    """A context: on entry every contender has ``members`` workers in one ring; on exit nothing is left running.

    Raises Retryable if a worker cannot be set up.
    """

    def __init__(self, contenders: Mapping[str, Contender], members: int) -> None:
        self.contenders = dict(contenders)
        self.members = members
        self.rings: dict[str, WorkerRing] = {}  # by contender
        self.bystander: WorkerRing  # a process outside all rings; it hosts the store
        self._token = secrets.token_hex(32)
        self._store = ""

    def _begin(self, folder: Path) -> None:
        self._folder = folder
        entries = {c.entry.partition(":")[0] for c in (STORE, *self.contenders.values())}
        self._forks = spawn_worker(
            self.stack,
            "the process that forks",
            "ft_hsdp.bench.workers.worker",
            sorted(entries),
            folder / "forks.log",
            {"GLOO_SOCKET_IFNAME": "lo"},  # FTAR is told its host; so is gloo
        )
        greet([self._forks])
        self.bystander = WorkerRing("bystander", [self._fork("bystander", STORE, 0)])
        self.stack.callback(self.bystander.close)
        greet(self.bystander.links)
        self._store = self.bystander.links[0].address
        for name, contender in self.contenders.items():
            ring = self.rings[name] = WorkerRing(name, ())
            self.stack.callback(ring.close)
            for member in range(self.members):
                ring.links.append(self._fork(name, contender, member))
            greet(ring.links)
            ring.join(range(self.members))

    def prepare(self, size: int) -> None:
        """Allocate ``size`` bytes everywhere, and see that every sum is right.

        Raises:
            ConfigError: Memory does not suffice.
            DataCorruption: A sum is wrong.
        """
        check_memory(self.contenders.values(), self.members, size)
        for ring in self.rings.values():
            ring.prepare(size)
            ring.check()

    def replace(self, name: str, member: int) -> None:
        """Start a fresh worker in the place of one that was killed; it is not in the ring yet."""
        links = self.rings[name].links
        links[member].close()
        links[member] = self._fork(name, self.contenders[name], member)
        greet([links[member]])

    def _fork(self, name: str, contender: Contender, member: int) -> WorkerLink:
        worker = f"{name} rank {member}"
        log = self._folder / f"{worker}.log"
        order = {"entry": contender.entry, "spec": asdict(self._spec(name, contender, member))}
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as file:
            self._forks.send(order, (theirs.fileno(), file.fileno()))
        try:
            collect([self._forks])
        except BaseException:
            ours.close()
            raise
        return WorkerLink(worker, ours, log)

    def _spec(self, name: str, contender: Contender, member: int) -> WorkerSpec:
        return WorkerSpec(name, member, self._store, self._token, contender.options)


def check_memory(contenders: Iterable[Contender], members: int, size: int) -> None:
    """Raise ConfigError where tensors of ``size`` bytes do not fit at all members of all contenders at once."""
    copies = sum(contender.copies for contender in contenders) * members
    check_room(copies, size, "all contenders at once take")
