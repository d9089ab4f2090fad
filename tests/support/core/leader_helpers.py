"""A leader among fakes: a lighthouse that answers on demand, outlets that collect."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_hsdp.control import leader as control
from ft_hsdp.control.leader import Leader, LeaderSettings
from ft_hsdp.core.commit import AttemptId, CommitToken, Contribution, Vote
from ft_hsdp.core.grant import Answer, Grant, Member, Report
from ft_hsdp.core.replica_state import DEFAULT, ReplicaPolicy
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import QuorumRequest
from tests.support.waiting import async_until

STATE = StateId(0, 0, "0" * 32)
OTHER = StateId(1, 3, "1" * 32)
SETTINGS = LeaderSettings(
    ranks=2,
    intervention="none",
    chunk_bytes=64,
    lease_s=60.0,
    answer_wait_s=30.0,
    join_timeout_s=30.0,
    token_timeout_s=30.0,
)


class Lighthouse:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asks: list[QuorumRequest] = []
        self.cancelled = 0
        self.answers: asyncio.Queue[Answer | Exception] = asyncio.Queue()

    async def ask(self, ask: QuorumRequest) -> Answer:
        self.asks.append(ask)
        try:
            answer = await self.answers.get()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


class Down(Lighthouse):
    """Is unreachable after the answers that it was given."""

    async def ask(self, ask: QuorumRequest) -> Answer:
        self.asks.append(ask)
        if self.answers.empty():
            raise LighthouseUnreachable("down")
        answer = self.answers.get_nowait()
        assert not isinstance(answer, Exception)
        return answer


class Scene:
    """A leader among fakes, and the bus to its ranks."""

    def __init__(
        self, folder: Path, lighthouse: Lighthouse | None = None, rules: ReplicaPolicy = DEFAULT, **settings: Any
    ) -> None:
        self.lighthouse = lighthouse or Lighthouse()
        self.orders: list[object] = []
        self.tokens: list[CommitToken] = []
        self.ended: list[tuple[str, int]] = []
        self._journal = folder / "events.jsonl"
        self._told = Journal(self._journal)
        about = QuorumRequest(Report(0, "0-x-0", STATE, 1), ("r0", "r1"), ("s0", "s1"), "hash", "layout")
        self.leader = Leader(
            control.initial(0, "0-x-0", 9, STATE, rules),
            about,
            self.lighthouse,  # type: ignore[arg-type]
            replace(SETTINGS, **settings),
            self,
            self.tokens.append,
            self._told,
        )

    def broadcast(self, order: object) -> None:
        self.orders.append(order)

    def end(self, reason: str, code: int) -> None:
        self.ended.append((reason, code))

    def events(self, name: str) -> list[dict[str, Any]]:
        self._told.flush()
        rows = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [r for r in rows if r["event"] == name]

    def named(self, kind: type) -> list[Any]:
        return [o for o in self.orders if isinstance(o, kind)]

    async def until(self, ready: Callable[[], Any], what: str) -> None:
        await async_until(ready, what, 5.0, lambda: f"orders: {self.orders}")

    async def granted(self, given: Grant) -> None:
        if not self.lighthouse.asks:
            self.leader.start()
        self.lighthouse.answers.put_nowait(given)
        await self.until(lambda: self.leader.replica.grant == given, "the grant is adopted")

    def vote(
        self, rank: int, fence: AttemptId, members: tuple[int, ...] = (0,), digest: str = "d", **more: Any
    ) -> None:
        batches = tuple(Contribution(m, 1, m, 0, loss=float(rank)) for m in members)
        self.leader.received(Vote(rank, fence, f"{digest}{rank}", 2.0, batches, **more))


def grant(epoch: int, *members: int, behind: tuple[int, ...] = (), base: StateId = STATE) -> Grant:
    named = tuple(
        Member(m, f"{m}-x-0", "behind" if m in behind else "contribute", (f"r{m}",) * 2, (f"s{m}",) * 2)
        for m in members
    )
    return Grant(1, epoch, base, named, 2, "test")


async def one_step(s: Scene) -> None:
    await s.granted(grant(1, 0))
    s.vote(0, AttemptId(1, 1, 0))
    s.vote(1, AttemptId(1, 1, 0))
