"""Snapshots: copies of a rank's committed states in the memory of its host's state agent.

They outlive the rank, so a restarted one finds its state again, and other replicas fetch them. `SnapshotWriter`
makes them on a thread of its own, while the main thread computes the next step (FT-HSDP §4.3). It carries out its
orders in the order in which they came:

    main thread    mark_current       an update is applied: copy the state, if each one is kept or a fetch needs it
    FTAR's thread  after              vote when the copy of the state before is complete or left out
    control loop   mark_settled       all ranks have a copy of the state before: older ones may go
                   request, release   replicas that are behind will fetch a state, or none will
    fetch thread   allocate, complete a fetched shard goes into the agent's memory itself

Readers of snapshots cannot hold up training, and training goes on without an agent: one that is lost is looked for
on another thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ft_hsdp import fault_injection
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.client import AgentGone, StateAgent
from ft_hsdp.state.agent.messages import (
    CloseGate,
    CompleteSnapshot,
    Forget,
    FreeCopies,
    KeepCopy,
    KeptCopies,
    OweCopies,
    Pin,
    Settle,
    Unpin,
)
from ft_hsdp.state.agent.starter import Starter
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from ft_hsdp.train.state.live_state import LiveState

ANSWER_S = 2.0  # default of the longest that an agent may hold up a vote, once, and
FRESH_BYTES_PER_S = 1e9  # the time that it may take longer, to get new memory
AGAIN_S = 1.0  # between two attempts to find an agent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgentHome:
    token: str  # of the job
    replica: int
    rank: int
    ranks: int
    starter: Starter | None  # on the rank of each host that starts the agent
    host: str = ""  # the host's name, if its machine has several


@dataclass(eq=False)
class SnapshotWriter:
    """Writes, keeps and finds the snapshots of one rank. Made when there is an agent: blocks for ``join_s``."""

    _live_state: LiveState
    _home: AgentHome
    _every_step: bool  # whether each state is copied, or only those that are requested
    _join_s: float  # how long an agent may take to answer at first, in seconds; also one that is found again
    _journal: Journal
    _failed: Callable[[BaseException], None]  # takes an error that must not happen; called on the writer's thread
    _answer_s: float = ANSWER_S  # how long an agent may take for an order before training goes on without it
    _wanted: StateId | None = None  # the state that was requested
    _filling: StateId | None = None  # a fetch writes into memory that only it may end with
    _staged: StateId | None = None  # the newest whole snapshot
    _order: threading.Lock = field(default_factory=threading.Lock)  # of what is submitted
    _last: Future[Any] | None = None  # what was submitted last
    _gate: Callable[[Bytes], None] | None = None  # takes the page of the gate, which is to be open
    _closing: threading.Event = field(default_factory=threading.Event)
    _seeking: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._agent: StateAgent | None = self._first()  # None: it is lost, and looked for
        self.address = self._agent.address  # where others fetch, host:port
        self._thread = ThreadPoolExecutor(1, "snapshots")

    # Before check-in.

    def list(self) -> tuple[CompleteSnapshot, ...]:
        """Return the snapshots that an earlier incarnation of this rank left behind, newest first. Blocks."""
        return self._submit(StateAgent.list).result() or ()

    def acquire(self, state: StateId) -> tuple[ShardManifest, Bytes] | None:
        """Return one of them, read-only; None if it is gone or damaged. Blocks.

        It does not change until `release_taken`.
        """
        found = self._submit(StateAgent.acquire, state).result()
        return None if found is None else (shard_manifest.decode(found[1]), found[0])

    def release_taken(self) -> None:
        self._submit(StateAgent.order, Unpin())

    # The main thread, and the thread that votes.

    def keeps(self, state: StateId | None) -> bool:
        """Return whether the agent has a whole snapshot of ``state``; asked when all orders are carried out."""
        return state is not None and self._staged == state

    def mark_current(self, state: StateId) -> None:
        """Note that the live state is ``state`` now, and copy it if it is to be kept. Does not block."""
        if self._every_step or self._wanted == state:
            self._submit(self._copy, state)

    # The control loop.

    def order(self, order: Settle | OweCopies | FreeCopies) -> None:
        """Have the agent carry out an order that tells it what to keep. Does not block."""
        self._submit(StateAgent.order, order)

    def request(self, state: StateId, seconds: float) -> None:
        """Keep a snapshot of ``state`` for ``seconds``, for members behind; made now, or when it is reached."""
        self._wanted, self._filling = state, None
        self._submit(StateAgent.order, Pin(state, seconds))
        if self._live_state.state == state:
            self._submit(self._copy, state)

    def release(self) -> None:
        """Let the requested snapshot go: no member is behind any more."""
        self._filling = None
        if self._wanted is not None:
            self._wanted = None
            self._submit(StateAgent.order, Unpin())

    def forget(self) -> None:
        """Drop all snapshots of this rank, because they are wrong.

        Blocks for about ``answer_s`` at most; an agent that does not answer by then is killed.
        """
        forgotten = None
        with contextlib.suppress(TimeoutError):
            forgotten = self._submit(lambda agent: (agent.order(Forget()), True)).result(self._answer_s)
        if forgotten is None:
            why, starter = "it does not drop wrong copies", self._home.starter
            if starter is not None:
                port = int(self.address.rpartition(":")[2])
                why = starter.renew(starter.ensure(port), port) or why
            self._journal.event("StateAgentLost", why)

    # Copies of other hosts' shards; see `train.state.copies`.

    def keep(self, order: KeepCopy, step: int, refused: Callable[[str], None]) -> None:
        """Have the agent copy another host's shard. Does not block.

        Args:
            refused: Called on the writer's thread with the reason if the agent has no room for it.
        """

        def ask(agent: StateAgent) -> None:
            if fault_injection.hit("copy-out", step):
                refused("copy-out: there is no memory for it")
            elif reason := agent.keep(order):
                refused(reason)

        self._submit(ask)

    def copied(self, state: StateId, wait_s: float) -> KeptCopies | None:
        """Return which of the ordered copies of ``state`` are complete; None without an agent.

        From a thread of its own. Blocks until none is under way any more, for about ``wait_s`` at most.
        """
        agent = self._agent
        if agent is None:
            return None
        try:
            return agent.kept(state, wait_s)
        except AgentGone:
            return None  # the writer's next order finds that out

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` when all orders so far are carried out: at once, or on the writer's thread."""
        with self._order:
            last = self._last
        if last is None or last.done():
            then()
        else:
            last.add_done_callback(lambda _: then())

    def wait(self, deadline_s: float | None = None) -> bool:
        """Return whether all orders so far are carried out within ``deadline_s``. Blocks until then."""
        done = threading.Event()
        self.after(done.set)
        return done.wait(deadline_s)

    def save(self, state: StateId, then: Callable[[ShardManifest | None, Bytes | None], None]) -> None:
        """Copy the live state for a checkpoint, beside the agent's memory. Does not block.

        Args:
            then: Called on the writer's thread with the manifest and the packed bytes, uint8; with None twice if
                there is no memory for the copy.
        """

        def copy() -> None:
            try:
                memory = np.empty(self._live_state.layout.nbytes, dtype=np.uint8)
            except MemoryError:
                then(None, None)
                return
            manifest = self._live_state.pack(state, memory)
            assert manifest is not None, "the next vote waits for this copy"
            then(manifest, memory)

        self._submit_alone(copy)

    # The gate of this rank's copies; see `train.state.copies.SpanWatch`.

    def open_gate(self, attach: Callable[[Bytes], None]) -> None:
        """Have the agent open this rank's gate, and call ``attach`` with its page. Does not block.

        Called again with another page when another agent takes the place of a lost one.
        """
        self._gate = attach
        self._submit(self._open_gate)

    def close_gate(self) -> None:
        self._gate = None
        self._submit(StateAgent.order, CloseGate())

    # A fetch.

    def allocate(self, state: StateId) -> Bytes | None:
        """Return memory of the agent, uint8, for a fetched shard of ``state``; None if there is none. Blocks."""
        self._filling = state
        return self._submit(StateAgent.stage, state).result()

    def complete(self, manifest: ShardManifest) -> None:
        self._submit(self._mark_staged, manifest).result()

    def close(self) -> None:
        """Carry out all orders and disconnect; the agent keeps what is complete. Blocks."""
        self._closing.set()
        self._thread.shutdown(wait=True)
        with self._order:
            agent = self._agent
        if agent is not None:
            agent.close()

    # On the writer's thread.

    def _submit(self, job: Callable[..., T], *arguments: object) -> Future[T | None]:
        with self._order:
            self._last = future = self._thread.submit(self._do, job, *arguments)
        return future

    def _submit_alone(self, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._failed(error)

        with self._order:
            self._last = self._thread.submit(run)

    def _do(self, job: Callable[..., T], *arguments: object) -> T | None:
        """Carry out one order, if there is an agent. A lost one is not looked for here: a vote waits for this."""
        agent = self._agent
        if agent is None:
            return None
        try:
            result = job(agent, *arguments)
            self._report_damage(agent)
            return result
        except AgentGone as error:
            self._journal.event("StateAgentLost", str(error))
            self._agent = self._staged = None
            self._seeking = threading.Thread(target=self._seek, name="snapshots-seek", daemon=True)
            self._seeking.start()
        except BaseException as error:
            self._failed(error)
        return None

    def _report_damage(self, agent: StateAgent) -> None:
        """Report the snapshots that the agent found damaged, and make another one of the live state."""
        damaged, agent.damaged = agent.damaged, []
        for found in damaged:
            state = found.state
            reason = f"the copy of {state} in host memory is damaged and dropped: {found.reason}"
            self._journal.event("SnapshotCorrupt", reason, step=state.step)
            if self._staged == state:
                self._staged = None
            if self._live_state.state == state and (self._every_step or self._wanted == state):
                self._copy(agent, state)

    def _copy(self, agent: StateAgent, state: StateId) -> None:
        if state == self._staged or self._filling is not None:
            return
        memory = None if fault_injection.hit("snapshot-out", state.step) else agent.stage(state)
        if memory is None:
            self._journal.event("SnapshotSkipped", agent.busy, step=state.step)
            return
        manifest = self._live_state.pack(state, memory)
        if manifest is not None:
            fault_injection.reach("snapshot", state.step)
            self._mark_staged(agent, manifest)

    def _mark_staged(self, agent: StateAgent, manifest: ShardManifest) -> None:
        agent.staged(manifest.state, shard_manifest.encode(manifest))
        self._staged, self._filling = manifest.state, None
        if fault_injection.hit("snapshot-flip", manifest.state.step):
            agent.flip()
        fault_injection.reach("snapshot-kept", manifest.state.step)

    def _open_gate(self, agent: StateAgent) -> None:
        page = agent.open_gate()
        if page is not None and self._gate is not None:
            self._gate(page)

    def _connect(self, deadline_s: float) -> StateAgent:
        home, nbytes = self._home, self._live_state.layout.nbytes
        agent = StateAgent.connect(home.token, home.replica, home.rank, home.ranks, nbytes, deadline_s, home.host)
        agent.deadline_s = self._answer_s + nbytes / FRESH_BYTES_PER_S
        return agent

    def _first(self) -> StateAgent:
        """Return the agent at the start.

        An agent that was there before may be frozen: it gets half the time, then the rank that may start one
        replaces it.
        """
        starter = self._home.starter
        if starter is None:
            return self._connect(self._join_s)
        listens = starter.ensure()
        try:
            return self._connect(self._join_s / 2)
        except AgentGone:
            done = starter.renew(listens)
            agent = self._connect(self._join_s / 2)
            if done:
                self._journal.event("StateAgentLost", done, over=True)
            return agent

    # On the thread that looks for an agent.

    def _seek(self) -> None:
        """Look for the agent, or for one in its place at the same address, until one answers."""
        reason = "snapshots are kept again"
        while not self._closing.wait(AGAIN_S):
            starter, port, listens = self._home.starter, int(self.address.rpartition(":")[2]), None
            try:
                if starter is not None:
                    listens = starter.ensure(port)
                agent = self._connect(self._join_s)
            except (AgentGone, ProtocolViolation):
                if starter is not None and not self._closing.is_set():  # who closes may end the agents
                    reason = starter.renew(listens, port) or reason
                continue
            except OSError as error:  # no process, descriptor or log for it: tried again
                self._journal.event("StateAgentNotStarted", error.strerror or str(error))
                continue
            with self._order:
                if self._closing.is_set():
                    agent.close()
                    return
                self._agent = agent
            if self._gate is not None:
                self._submit(self._open_gate)
            self._journal.event("StateAgentLost", reason, over=True)
            return
