"""Keeper: copies a rank's committed states into the memory of its host's state agent, on a thread of its own.

What it is told is done in order. A rank votes on a step when its snapshot of the state before is complete or left
out (`after`), and its vote says which. If all ranks have it, the commit of the step settles it, and older ones may
go; else the newest settled one stays. Whoever reads snapshots cannot hold up training, and without an agent
training goes on without them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ft_hsdp import fault_injection
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.jsonl import Journal
from ft_hsdp.state.agent.client import AgentGone, StateAgent
from ft_hsdp.state.agent.launcher import Starter
from ft_hsdp.state.agent.slots import CompleteSnapshot as Kept
from ft_hsdp.state.shared_memory import Bytes
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest
from ft_hsdp.train.live_state import LiveState

ANSWER_S = 2.0  # the longest that an agent may hold up a vote, once, where nobody says otherwise, and
FRESH_BYTES_PER_S = 1e9  # what it takes it longer to get new memory
AGAIN_S = 1.0  # between two attempts to find an agent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AgentHome:
    """Whose snapshots are kept; ``starter`` is there on the rank of each host that starts the agent."""

    token: str
    replica: int
    rank: int
    ranks: int
    starter: Starter | None


class SnapshotWriter:
    """The snapshots of ``held``, of each step or of those that are wanted.

    ``failed`` is told what must not happen. An agent that does not answer within ``answer_s`` is done without; one
    that answers within ``join_s``, or another one in its place, is looked for on a thread of its own. Raises
    AgentGone if there is no agent at the start.
    """

    def __init__(
        self,
        held: LiveState,
        home: AgentHome,
        every_step: bool,
        join_s: float,
        journal: Journal,
        failed: Callable[[BaseException], None],
        answer_s: float = ANSWER_S,
    ) -> None:
        self._held = held
        self._home = home
        self._every_step = every_step
        self._journal = journal
        self._failed = failed
        self._wanted: StateId | None = None
        self._filling: StateId | None = None  # a fetch writes into memory that only it may end with
        self._staged: StateId | None = None
        self._order = threading.Lock()
        self._last: Future[Any] | None = None
        self._join_s = join_s
        self._answer_s = answer_s
        self._closing = threading.Event()
        self._seeking: threading.Thread | None = None
        self._agent: StateAgent | None = self._first()
        self.address = self._agent.address
        self._thread = ThreadPoolExecutor(1, "keeper")

    # Before check-in.

    def list(self) -> tuple[Kept, ...]:
        """The snapshots that an earlier incarnation of this rank left behind, newest first."""
        return self._submit(lambda agent: agent.list()).result() or ()

    def acquire(self, state: StateId) -> tuple[ShardManifest, Bytes] | None:
        """One of them, read-only; it does not change until `release_taken`."""
        found = self._submit(lambda agent: agent.acquire(state)).result()
        return None if found is None else (shard_manifest.decode(found[1]), found[0])

    def release_taken(self) -> None:
        """What was taken was used."""
        self._submit(lambda agent: agent.unpin())

    # The main thread, or whoever votes.

    def keeps(self, state: StateId | None) -> bool:
        """Whether the agent has a whole snapshot of ``state``; asked when all that was ordered is done."""
        return state is not None and self._staged == state

    def mark_current(self, state: StateId) -> None:
        """``state`` is what is held now."""
        if self._every_step or self._wanted == state:
            self._submit(self._copy, state)

    # The control loop.

    def mark_settled(self, state: StateId, everywhere: bool) -> None:
        """All ranks of the replica have a snapshot of ``state``, or (not ``everywhere``) some have left it out."""
        self._submit(lambda agent: agent.mark_settled(state, everywhere))

    def request(self, state: StateId, seconds: float) -> None:
        """Members that are behind will fetch ``state`` within ``seconds``: have it, now or when it is reached."""
        self._wanted, self._filling = state, None
        self._submit(lambda agent: agent.pin(state, seconds))
        if self._held.state == state:
            self._submit(self._copy, state)

    def release(self) -> None:
        """Nobody fetches."""
        self._filling = None
        if self._wanted is not None:
            self._wanted = None
            self._submit(lambda agent: agent.unpin())

    def forget(self) -> None:
        """Drop all snapshots of this rank: what they hold is wrong. An agent that cannot is killed."""
        forgotten = None
        with contextlib.suppress(TimeoutError):
            forgotten = self._submit(lambda agent: (agent.forget(), True)).result(self._answer_s)
        if forgotten is None:
            self._journal.event("SnapshotsNotForgotten", "the state agent does not answer: it is killed")
            if self._home.starter is not None:
                self._renew(self._home.starter, int(self.address.rpartition(":")[2]))

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` when all that was ordered is done: at once, or on the keeper's thread."""
        with self._order:
            last = self._last
        if last is None or last.done():
            then()
        else:
            last.add_done_callback(lambda _: then())

    def save(self, state: StateId, then: Callable[[ShardManifest | None, Bytes | None], None]) -> None:
        """Give ``then`` a copy of ``state``, which is held now, on the keeper's thread; None: no memory for it."""

        def copy() -> None:
            try:
                memory = np.empty(self._held.layout.nbytes, dtype=np.uint8)
            except MemoryError:
                then(None, None)
                return
            manifest = self._held.pack(state, memory)
            assert manifest is not None, "the next vote waits for this copy"
            then(manifest, memory)

        self._submit_alone(copy)

    # A fetch.

    def allocate(self, state: StateId) -> Bytes | None:
        """Memory of the agent for a snapshot that comes from elsewhere; None if there is none."""
        self._filling = state
        return self._submit(lambda agent: agent.stage(state)).result()

    def complete(self, manifest: ShardManifest) -> None:
        """That memory holds the whole snapshot, verified."""
        self._submit(lambda agent: self._mark_staged(agent, manifest)).result()

    def close(self) -> None:
        """Finish what was ordered and hang up; the agent keeps what is complete."""
        self._closing.set()
        self._thread.shutdown(wait=True)
        with self._order:
            agent = self._agent
        if agent is not None:
            agent.close()

    # On the keeper's thread.

    def _submit(self, job: Callable[..., T], *arguments: object) -> Future[T | None]:
        with self._order:
            self._last = future = self._thread.submit(self._do, job, *arguments)
        return future

    def _submit_alone(self, job: Callable[[], None]) -> None:
        """An order that needs no agent."""

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._failed(error)

        with self._order:
            self._last = self._thread.submit(run)

    def _do(self, job: Callable[..., T], *arguments: object) -> T | None:
        """Carry out one order, if there is an agent; nobody is looked for here, for the vote waits for this."""
        agent = self._agent
        if agent is None:
            return None
        try:
            result = job(agent, *arguments)
            self._lament(agent)
            return result
        except AgentGone as error:
            self._journal.event("StateAgentLost", str(error))
            self._agent = self._staged = None
            self._seeking = threading.Thread(target=self._seek, name="keeper-seeks", daemon=True)
            self._seeking.start()
        except BaseException as error:
            self._failed(error)
        return None

    def _lament(self, agent: StateAgent) -> None:
        """Say which copies were found damaged, and make another one of what is held."""
        damaged, agent.damaged = agent.damaged, []
        for found in damaged:
            state = found.state
            reason = f"the copy of {state} in host memory is damaged and dropped: {found.reason}"
            self._journal.event("SnapshotCorrupt", reason, step=state.step)
            if self._staged == state:
                self._staged = None
            if self._held.state == state and (self._every_step or self._wanted == state):
                self._copy(agent, state)

    def _copy(self, agent: StateAgent, state: StateId) -> None:
        if state == self._staged or self._filling is not None:
            return
        memory = None if fault_injection.hit("snapshot-out", state.step) else agent.stage(state)
        if memory is None:
            self._journal.event("SnapshotSkipped", agent.busy, step=state.step)
            return
        manifest = self._held.pack(state, memory)
        if manifest is not None:
            fault_injection.reach("snapshot", state.step)
            self._mark_staged(agent, manifest)

    def _mark_staged(self, agent: StateAgent, manifest: ShardManifest) -> None:
        agent.staged(manifest.state, shard_manifest.encode(manifest))
        self._staged, self._filling = manifest.state, None
        if fault_injection.hit("snapshot-flip", manifest.state.step):
            agent.flip()
        fault_injection.reach("snapshot-kept", manifest.state.step)

    def _connect(self, deadline_s: float) -> StateAgent:
        home, nbytes = self._home, self._held.layout.nbytes
        agent = StateAgent.connect(home.token, home.replica, home.rank, home.ranks, nbytes, deadline_s)
        agent.deadline_s = self._answer_s + nbytes / FRESH_BYTES_PER_S
        return agent

    def _first(self) -> StateAgent:
        """The agent at the start. Who starts it gives one that is there half the time: it may be frozen."""
        starter = self._home.starter
        if starter is None:
            return self._connect(self._join_s)
        try:
            return self._connect(self._join_s / 2)
        except AgentGone:
            self._renew(starter, 0)
            return self._connect(self._join_s / 2)

    def _renew(self, starter: Starter, port: int) -> None:
        done = starter.renew(port)
        if done:
            self._journal.event("StateAgentReplaced", done)

    # On the thread that looks for an agent.

    def _seek(self) -> None:
        """Wait for the agent, or for another one, which listens where the one before did."""
        while not self._closing.wait(AGAIN_S):
            starter, port = self._home.starter, int(self.address.rpartition(":")[2])
            try:
                if starter is not None:
                    starter.ensure(port)
                agent = self._connect(self._join_s)
            except (AgentGone, ProtocolViolation):
                if starter is not None:
                    self._renew(starter, port)
                continue
            except OSError as error:  # no process, descriptor or log for it: tried again
                self._journal.event("StateAgentNotStarted", error.strerror or str(error))
                continue
            with self._order:
                if self._closing.is_set():
                    agent.close()
                    return
                self._agent = agent
            self._journal.event("StateAgentFound", "snapshots are kept again")
            return
