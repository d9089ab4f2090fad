"""A day of a job as the lighthouse's database holds it, made up from a seed: for tests of size and of the page."""

import math
import random
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from ft_hsdp.core import state_id
from lighthouse.journal.database import SqliteDatabase
from lighthouse.overview.overview import JournalEntry

START = 1_780_000_000.0
STEP_S = 0.95
BETWEEN_FAILURES_S = 2100.0
KINDS = ("SIGKILL", "SIGKILL", "SIGKILL", "SIGSTOP", "exit 1")
TERM = 1_780_000_000
BASE = "ab" * 16


class _Day:
    """The story; `rows` tells it. One replica at a time is lost, now and then one is slow."""

    def __init__(self, replicas: int, hours: float, seed: int, ranks: int) -> None:
        self.random = random.Random(seed)
        self.replicas, self.ranks = replicas, ranks
        self.end = START + hours * 3600
        self.t = START
        self.epoch = self.step = 0
        self.members = list(range(replicas))
        self.lives = [0] * replicas
        self.prev = BASE

    def name(self, replica: int) -> str:
        return f"{replica}-5eed{replica:04x}-{self.lives[replica]}"

    def event(self, name: str, after: float, source: str, reason: str, **facts: Any) -> dict[str, Any]:
        return {"t": self.t + after, "event": name, "source": source, "reason": reason, **facts}

    def of(self, name: str, after: float, replica: int, reason: str, rank: int | None = 0, **facts: Any) -> Any:
        who = {"replica": replica, "rank": rank, "incarnation": self.name(replica)}
        return self.event(name, after, "replica", reason, **who, **facts)

    def by_supervisor(self, name: str, after: float, replica: int, reason: str, **facts: Any) -> dict[str, Any]:
        who = {"replica": replica, "incarnation": self.name(replica)}
        return self.event(name, after, "supervisor", reason, **who, **facts)

    def commit(self, took: float, contributors: list[int]) -> dict[str, Any]:
        self.t += took
        self.step += 1
        self.prev = state_id.digest(self.step, self.epoch)
        share = len(contributors) / self.replicas
        return {
            "t": self.t,
            "step": self.step,
            "epoch": self.epoch,
            "attempt": 0,
            "lineage": self.prev,
            "contributors": contributors,
            "loss": 1.8 + 3.8 * math.exp(-self.step / 9000) + self.random.gauss(0, 0.03),
            "lr": 3e-4 * math.sqrt(share),
            "lr_scale": math.sqrt(share),
            "norm": 1 + self.random.random(),
            "total": self.replicas,
            "units": 2 * len(contributors),
            "units_wanted": 2 * self.replicas,
            "step_s": took,
            "waits": {"ftar": 0.03 * self.random.random(), "commit": 0.01 + 0.01 * self.random.random()},
            "ftar_bytes": 530_000_000,
            "ftar_s": 0.4 + 0.05 * self.random.random(),
            "tokens": 4096 * len(contributors),
            "incarnation": self.name(contributors[0]),
            "role": "contribute",
        }

    def grant(self, after: float, why: str, behind: int | None = None) -> Iterator[dict[str, Any]]:
        """An epoch, and what every member does about it."""
        self.epoch += 1
        roles = {str(r): "behind" if r == behind else "contribute" for r in self.members}
        base = [self.epoch - 1, self.step, self.prev]
        facts: dict[str, Any] = {"epoch": self.epoch, "step": self.step + 1, "members": list(self.members)}
        # Each replica says once where it runs: two ranks on each host, two replicas in each rack.
        hosts = {str(r): [[f"a/{r // 2}/n{r}h{i}", 2] for i in range(self.ranks // 2)] for r in self.members}
        placed = {"hosts": hosts} if self.epoch == 1 else {}
        yield self.event(
            "EpochGranted", after, "lighthouse", why, term=TERM, base=base, roles=roles, **facts, **placed
        )
        for r in self.members:
            at = after + 0.01 + 0.02 * self.random.random()
            yield self.of("GrantAdopted", at, r, why, role=roles[str(r)], **facts)
            if self.step and r != behind:
                again = "the same gradient is reduced again on another ring"
                yield self.of("StepRetried", at, r, again, epoch=self.epoch, step=self.step + 1, attempt=0)
            for rank in range(self.ranks):
                formed = at + 0.05 + 0.05 * self.random.random()
                why_connected = "both neighbours are in this epoch"
                yield self.of("RingConnected", formed, r, why_connected, rank, epoch=self.epoch)

    def start(self, replica: int, after: float, reason: str) -> Iterator[dict[str, Any]]:
        """A new incarnation until it checks in."""
        life = self.lives[replica]
        yield self.by_supervisor(
            "ReplicaStarted", after, replica, reason, pids=[4000 + replica, 5000 + replica], restarts=life
        )
        if life:
            kept = {str(rank): f"n{replica ^ 1}h{rank // 2}" for rank in range(self.ranks)}
            origin: dict[str, Any] = {"from": kept}
            yield self.of(
                "StateRestored",
                after + 20,
                replica,
                "state agents of other replicas kept a part of it",
                step=self.step - 1,
                origin="replica",
                rung="replica",
                number=life,
                ranks=self.ranks,
                bytes=54_000_000,
                seconds=0.21,
                lost_steps=1,
                state=[self.epoch, self.step - 1, BASE],
                **origin,
            )
        yield self.of("ReplicaWarmed", after + 21, replica, "model, optimizer and connections are ready")
        yield self.of("CheckedIn", after + 21.4, replica, "warm", state="(0, 0, abababab)")

    def rows(self) -> Iterator[dict[str, Any]]:
        yield self.event("LighthouseStarted", 0, "lighthouse", "nothing was ever granted", term=TERM, epoch=0)
        for r in range(self.replicas):
            yield from self.start(r, 2 + 0.05 * r, "first start")
        self.t += 26
        yield from self.grant(0, f"first epoch; replicas {self._ids(self.members)} contribute")
        yield self.of("Protected", 1, 0, "healthy replicas are the copies", copies=2, apart="rack")
        due = self.t + self._until_next()
        while self.t < self.end:
            took = STEP_S * (1 + abs(self.random.gauss(0, 0.04)))
            yield self.commit(took if self.random.random() > 0.001 else 3 * took, list(self.members))
            if self.t >= due and self.replicas > 1:
                yield from self._failure()
                due = self.t + self._until_next()

    def _until_next(self) -> float:
        return 200 + self.random.expovariate(1 / (BETWEEN_FAILURES_S - 200))

    def _failure(self) -> Iterator[dict[str, Any]]:
        """One replica dies; the others go on; it comes back."""
        lost, kind, rank = (
            self.random.randrange(self.replicas),
            self.random.choice(KINDS),
            self.random.randrange(self.ranks),
        )
        seen = 1.1 if kind == "SIGSTOP" else 0.05 + 0.1 * self.random.random()
        why, where = f"rank {rank} ended with {kind}", {"rank": rank}
        if kind.startswith("SIG"):
            who = {"replica": lost, **where, "incarnation": self.name(lost)}
            yield self.event("FailureInjected", 0, "chaos", "chaos by hand", **who, kind=kind, pid=4000, for_s=0.0)
        old = self.epoch
        for side in {(lost - 1) % self.replicas, (lost + 1) % self.replicas} - {lost}:
            cause = f"replica {lost} closed its connection"
            at = seen + 0.01 * self.random.random()
            yield self.of("RingBroken", at, side, cause, epoch=old, suspect=lost, cause=cause, at_rank=rank)
        yield self.by_supervisor("ProcessExited", seen + 0.02, lost, why, **where, pid=4000 + lost, kind=kind)
        codes = {str(n): -9 for n in range(self.ranks)}
        yield self.by_supervisor("ReplicaExited", seen + 0.08, lost, why, kind=kind, **where, codes=codes)
        yield self.by_supervisor("RestartScheduled", seen + 0.08, lost, f"{kind}: {why}; restart", delay_s=0.0)
        who = {"replica": lost, "incarnation": self.name(lost)}
        yield self.event("ExitReported", seen + 0.09, "lighthouse", "its supervisor saw it end", **who)
        self.members.remove(lost)
        yield from self.grant(
            seen + 0.1, f"the ring of epoch {old} broke; replicas {self._ids(self.members)} contribute"
        )
        yield self.commit(seen + 0.4 + STEP_S, list(self.members))
        self.lives[lost] += 1
        yield from self.start(lost, 0.5, f"{kind}: {why}; restart {self.lives[lost]} of 20")
        for _ in range(23):
            yield self.commit(STEP_S * (1 + abs(self.random.gauss(0, 0.04))), list(self.members))
        self.members = sorted([*self.members, lost])
        yield from self.grant(0.1, f"joined: replica {lost}", behind=lost)
        yield self.of("LeftBehind", 0.12, lost, f"left behind: epoch {self.epoch} builds on newer", step=self.step)
        donors = [r for r in self.members if r != lost][:2]
        for n in range(self.ranks):
            yield self.of("FetchStarted", 0.15, lost, "left behind", n, step=self.step, donors=donors)
        for n in range(self.ranks):
            facts: dict[str, Any] = {"donor": donors[0], "seconds": 3.1, "bytes": 2_400_000_000, "step": self.step}
            yield self.of("FetchCompleted", 3.3 + 0.1 * n, lost, "verified", n, **facts)
        for _ in range(4):
            yield self.commit(STEP_S * 1.05, [r for r in self.members if r != lost])
        yield from self.grant(0.1, f"caught up: replica {lost}")
        yield self.commit(STEP_S * 1.2, list(self.members))
        facts = {"epoch": self.epoch, "step": self.step, "attempt": 0}
        yield self.of("Rejoined", 0.01, lost, "contributes again", **facts)

    @staticmethod
    def _ids(members: list[int]) -> str:
        return ",".join(map(str, members))


def day(replicas: int = 20, hours: float = 24, seed: int = 7, ranks: int = 2) -> Iterator[JournalEntry]:
    """The rows of a day with their numbers: events of all processes, and one commit for each step."""
    for seq, row in enumerate(_Day(replicas, hours, seed, ranks).rows(), 1):
        yield JournalEntry(seq, "event" if "event" in row else "commit", row)


def write_day(path: Path, replicas: int = 20, hours: float = 24, shift: float = 0.0) -> int:
    """Write a day, ``shift`` seconds later, into a new database at ``path``; how many rows it has."""
    with closing(SqliteDatabase(path)) as database:
        rows = (JournalEntry(seq, kind, {**row, "t": row["t"] + shift}) for seq, kind, row in day(replicas, hours))
        while batch := list(islice(rows, 5000)):
            database.append(batch)
        return database.last
