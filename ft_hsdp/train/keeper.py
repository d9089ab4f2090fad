"""Keeper: copies a rank's committed states into the memory of its host's state agent, on a thread of its own.

What it is told is done in order. A rank votes on a step only when its snapshot of the state before is complete
(`after`), so the commit of a step says that all ranks of the replica have that snapshot: it is settled. Whoever
reads snapshots cannot hold up training, and without an agent training goes on without them; a rank that had to
leave one out settles nothing, and what its replica has in common may be older.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ft_hsdp import failpoints
from ft_hsdp.core.lineage import StateId
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.events import Journal
from ft_hsdp.state import wire
from ft_hsdp.state.client import AgentGone, StateAgent
from ft_hsdp.state.segment import Bytes
from ft_hsdp.state.slots import Held as Kept
from ft_hsdp.state.start import Starter
from ft_hsdp.state.wire import Manifest
from ft_hsdp.train.held import Held

ANSWER_S = 2.0  # the longest that an agent may hold up a vote, once, and
FRESH_BYTES_PER_S = 1e9  # what it takes it longer to get new memory
AGAIN_S = 5.0  # between two attempts to find an agent

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Home:
    """Whose snapshots are kept; ``starter`` is there on the rank of each host that starts the agent."""

    token: str
    replica: int
    rank: int
    ranks: int
    starter: Starter | None


class Keeper:
    """The snapshots of ``held``, of each step or of those that are wanted.

    ``failed`` is told what must not happen. Raises AgentGone if there is no agent within ``join_s`` seconds.
    """

    def __init__(
        self,
        held: Held,
        home: Home,
        every_step: bool,
        join_s: float,
        journal: Journal,
        failed: Callable[[BaseException], None],
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
        self._tried = 0.0
        self._agent: StateAgent | None = self._connect(join_s)
        self.address = self._agent.address
        self._thread = ThreadPoolExecutor(1, "keeper")

    # Before check-in.

    def recall(self) -> tuple[Kept, ...]:
        """The snapshots that an earlier incarnation of this rank left behind, newest first."""
        return self._submit(lambda agent: agent.recall()).result() or ()

    def take(self, state: StateId) -> tuple[Manifest, Bytes] | None:
        """One of them, read-only; it does not change until `release_taken`."""
        found = self._submit(lambda agent: agent.take(state)).result()
        return None if found is None else (wire.decode_header(found[1]), found[0])

    def release_taken(self) -> None:
        """What was taken was used."""
        self._submit(lambda agent: agent.unpin())

    # The main thread.

    def reached(self, state: StateId) -> None:
        """``state`` is what is held now."""
        if self._every_step or self._wanted == state:
            self._submit(self._copy, state)

    def settle(self, state: StateId) -> None:
        """All ranks of the replica have staged ``state``, if it was to be staged."""
        self._submit(self._settle, state)

    # The control loop.

    def want(self, state: StateId, seconds: float) -> None:
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
        """Drop all snapshots of this rank: what they hold is wrong. If that fails, it is found wrong again."""
        try:
            self._submit(lambda agent: agent.forget()).result(ANSWER_S)
        except TimeoutError:
            self._journal.event("SnapshotsNotForgotten", f"the state agent did not answer within {ANSWER_S:g} s")

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then`` when all that was ordered is done: at once, or on the keeper's thread."""
        with self._order:
            last = self._last
        if last is None or last.done():
            then()
        else:
            last.add_done_callback(lambda _: then())

    def save(self, state: StateId, then: Callable[[Manifest, Bytes], None]) -> None:
        """Give ``then`` a copy of ``state``, which is held now, on the keeper's thread."""

        def copy() -> None:
            memory = np.empty(self._held.layout.nbytes, dtype=np.uint8)
            manifest = self._held.pack(state, memory)
            assert manifest is not None, "the next vote waits for this copy"
            then(manifest, memory)

        self._submit_alone(copy)

    # A fetch.

    def room(self, state: StateId) -> Bytes | None:
        """Memory of the agent for a snapshot that comes from elsewhere; None if there is none."""
        self._filling = state
        return self._submit(lambda agent: agent.stage(state)).result()

    def filled(self, manifest: Manifest) -> None:
        """That memory holds the whole snapshot, verified."""
        self._submit(lambda agent: self._complete(agent, manifest)).result()

    def close(self) -> None:
        """Finish what was ordered and hang up; the agent keeps what is complete."""
        self._thread.shutdown(wait=True)
        if self._agent is not None:
            self._agent.close()

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
        """Carry out one order, if there is an agent."""
        agent = self._agent or self._again()
        if agent is None:
            return None
        try:
            return job(agent, *arguments)
        except AgentGone as error:
            self._journal.event("StateAgentLost", str(error))
            self._agent, self._staged, self._tried = None, None, time.monotonic()
        except BaseException as error:
            self._failed(error)
        return None

    def _copy(self, agent: StateAgent, state: StateId) -> None:
        if state == self._staged or self._filling is not None:
            return
        memory = agent.stage(state)
        if memory is None:
            self._journal.event("SnapshotSkipped", agent.busy, step=state.step)
            return
        manifest = self._held.pack(state, memory)
        if manifest is not None:
            failpoints.reach("snapshot", state.step)
            self._complete(agent, manifest)

    def _complete(self, agent: StateAgent, manifest: Manifest) -> None:
        agent.staged(manifest.state, wire.encode(replace(manifest, checksums=())))
        self._staged, self._filling = manifest.state, None

    def _settle(self, agent: StateAgent, state: StateId) -> None:
        if self._staged == state:
            agent.settle(state)

    def _connect(self, deadline_s: float) -> StateAgent:
        home, nbytes = self._home, self._held.layout.nbytes
        agent = StateAgent.connect(home.token, home.replica, home.rank, home.ranks, nbytes, deadline_s)
        agent.deadline_s = ANSWER_S + nbytes / FRESH_BYTES_PER_S
        return agent

    def _again(self) -> StateAgent | None:
        """Look for another agent, now and then; it listens where the one before did."""
        if time.monotonic() < self._tried + AGAIN_S:
            return None
        if self._home.starter is not None:
            self._home.starter.ensure(int(self.address.rpartition(":")[2]))
        try:
            self._agent = self._connect(ANSWER_S)
        except (AgentGone, ProtocolViolation):
            self._tried = time.monotonic()
            return None
        self._journal.event("StateAgentFound", "snapshots are kept again")
        return self._agent
