"""What the tests of the lighthouse share: short names for states and reports, and a script of events."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.grant import Answer, Grant, Refused, Report
from ft_hsdp.core.host_report import HostReport
from ft_hsdp.core.state_id import StateId
from ft_hsdp.protocol import QuorumRequest
from lighthouse.placement.state import Presence, PresentHost
from lighthouse.quorum.events import (
    Asked,
    AskWithdrawn,
    Event,
    Evict,
    Note,
    OpenRequest,
    ProcessesReported,
    Reply,
    Ticked,
)
from lighthouse.quorum.rules import replace
from lighthouse.quorum.state import Agreement, LighthouseState, Policy, with_view
from lighthouse.quorum.transition import transition
from lighthouse.service import Service
from lighthouse.store import FORMAT, Rows, Store, StoreFailed
from tests.support.launch.launch_rows import commit
from tests.support.waiting import async_until

TOKEN = "5e" * 32
ADMIN = "ad" * 32
START = StateId(0, 0, state_id.digest("start"))
Row = Mapping[str, Any]

CONFIG_HASH = "c" * 32
LAYOUT = "l" * 32
NOW = 1_780_000_000.0  # of the rows of journals


class MemoryStore(Store):
    """A store that dies with its process. ``rows`` may be given to another one; while ``full``, writes fail."""

    full = False

    def __init__(self, rows: Rows | None = None) -> None:
        super().__init__("in memory")
        self.rows: Rows = {} if rows is None else rows
        self.writes = 0

    def close(self) -> None:
        """Do nothing; there is no lock."""

    def _read(self) -> tuple[int, Rows]:
        return FORMAT, dict(self.rows)

    def _write(self, rows: Rows) -> None:
        if self.full:
            raise StoreFailed("lighthouse store: full")
        self.rows.update(rows)
        self.writes += 1


def at(epoch: int, step: int, history: str = "") -> StateId:
    return StateId(epoch, step, state_id.digest(epoch, step, history))


def name(replica: int, life: int = 0) -> str:
    return f"{replica}-run-{life}"


def record(before: StateId, epoch: int, attempt: int = 0, digest: str = "sum") -> CommitRecord:
    put = (Contribution(0, 1, 0, before.step), Contribution(1, 1, 1, before.step))
    return CommitRecord(epoch, attempt, before.step + 1, before.lineage, (0, 1), 3, put, digest)


def commit_row(step: int, replica: int = 0, **changes: Any) -> Row:
    """A row of commits.jsonl as telemetry tells it: with lineages that the journal takes, of a certain rate."""
    figures = {"loss": 2.5, "waits": {"ftar": 0.1, "commit": 0.01}, "ftar_bytes": 2_000_000_000, "ftar_s": 0.5}
    names = {"lineage": f"{step:032x}", "prev": f"{step - 1:032x}", "incarnation": f"{replica}-a-0"}
    return commit(step, **{"t": NOW + step, "tokens": 300, **figures, **names, **changes})


def report(replica: int, state: StateId = START, life: int = 0, **fields: Any) -> Report:
    """A report that asks for the step after `state`."""
    return Report(replica, name(replica, life), state, fields.pop("step", state.step + 1), **fields)


def ask(replica: int, state: StateId = START, life: int = 0, **fields: Any) -> QuorumRequest:
    host = f"127.0.0.1:{7000 + replica}"
    return QuorumRequest(report(replica, state, life, **fields), (host,), (host,), CONFIG_HASH, LAYOUT)


@dataclass(frozen=True)
class Out:
    """What one event led to."""

    answers: dict[int, Answer]
    notes: dict[str, str]
    evicted: list[str]

    def grant(self, replica: int) -> Grant:
        answer = self.answers[replica]
        assert isinstance(answer, Grant), answer
        return answer


def restarted(s: LighthouseState, policy: Policy | None = None) -> LighthouseState:
    """What the next lighthouse begins with."""
    store = MemoryStore()
    store.load(s.policy)
    store.save(s)
    return MemoryStore(store.rows).load(policy or s.policy)


class Script:
    """Feeds events to `transition`, one after the other.

    Another replica is taken to have named each state before, as in a ring that commits it; but not if ``lone``.
    """

    def __init__(self, total: int = 3, term: int = 100, lone: bool = False, **policy: Any) -> None:
        self.lone = lone
        self.s = LighthouseState.empty(Policy(**{"slots": total, "steps": 10, **policy}), term)
        self.now = 0.0
        self._id = 0

    def feed(self, event: Event) -> Out:
        self.s, effects = transition(self.s, event)
        return Out(
            {e.replica: e.answer for e in effects if isinstance(e, Reply)},
            {e.event: e.reason for e in effects if isinstance(e, Note)},
            [e.incarnation for e in effects if isinstance(e, Evict)],
        )

    def ask(self, replica: int, state: StateId = START, life: int = 0, **fields: Any) -> Out:
        self._id += 1
        if state.step > 0 and not self.lone and self.s.policy.slots > 1:
            self.s = with_view(self.s, (replica + 1) % self.s.policy.slots, claim=state)
        return self.feed(Asked(OpenRequest(report(replica, state, life, **fields), self._id), self.now))

    def withdraw(self, replica: int) -> Out:
        """A replica closes the connection of its newest ask."""
        open_ask = self.s.views[replica].ask
        assert open_ask is not None
        return self.feed(AskWithdrawn(replica, open_ask.id))

    def runs(
        self,
        running: dict[int, int | None],
        exited: Iterable[tuple[int, int]] = (),
        lost: Iterable[int] = (),
        ended: Iterable[int] = (),
    ) -> Out:
        """A supervisor says which lives run, which have exited, and which replicas are done."""
        processes = {r: None if life is None else name(r, life) for r, life in running.items()}
        gone = frozenset((r, name(r, life)) for r, life in exited)
        return self.feed(ProcessesReported(processes, gone, frozenset(lost), self.now, ended=frozenset(ended)))

    def wait(self, seconds: float) -> Out:
        """Time passes."""
        self.now += seconds
        return self.feed(Ticked(self.now))

    def restart(self) -> None:
        """The lighthouse ends, and another one begins with what it stored."""
        self.s = restarted(self.s)

    def first(self, *replicas: int) -> Grant:
        """The first epoch, of these replicas; the others are down."""
        others = set(range(self.s.policy.slots)) - set(replicas)
        self.runs(dict.fromkeys(replicas, 0) | dict.fromkeys(others))
        out = [self.ask(r) for r in replicas][-1]
        return out.grant(replicas[-1])


def make_service(
    total: int = 2,
    store: MemoryStore | None = None,
    config_hash: str | None = None,
    rules: Mapping[str, str] | None = None,
    long_poll_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    note: Callable[[Row], None] | None = None,
    job: str = "job",
    **policy: Any,
) -> tuple[Any, list[Row]]:
    """A service, and its rows unless they are noted elsewhere."""
    rows: list[Row] = []
    store = store or MemoryStore()
    state = store.load(Policy(**{"slots": total, "steps": 10, **policy}))
    service = Service(
        state,
        store,
        TOKEN,
        note or rows.append,
        name=job,
        agreed=None if config_hash is None else Agreement(config_hash, rules=tuple(sorted((rules or {}).items()))),
        long_poll_s=long_poll_s,
        clock=clock,
    )
    return service, rows


def hosted(s: LighthouseState, replica: int | None = None) -> LighthouseState:
    """`s` with the agent of a host, which takes ranks of one replica, or of each."""
    agent = HostReport("n0", "a", "here", 1, "127.0.0.1:29500", replica=replica)
    return replace(s, presence=Presence(hosts={"n0": PresentHost(agent, 0.0)}))


def heard(service: Service, running: Mapping[int, str | None], *exited: str, lost: Iterable[int] = ()) -> None:
    """A service hears what runs, which incarnations have exited, and which replicas are given up."""
    gone = frozenset((int(each.partition("-")[0]), each) for each in exited)
    service.apply(ProcessesReported(running, gone, frozenset(lost), time.monotonic()))


def refusal(answer: object) -> Refused:
    assert isinstance(answer, Refused), answer
    return answer


def events(rows: list[Row], *names: str) -> list[Row]:
    return [r for r in rows if not names or r["event"] in names]


async def granted(service: Any, *replicas: int) -> list[Any]:
    """The answers of the first epoch of these replicas."""
    return await asyncio.gather(*(service.ask(ask(r)) for r in replicas))


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server.serve())
    try:
        await async_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def quiet() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)
