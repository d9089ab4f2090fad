"""Ground: what a rank has before it knows which replica it is, and keeps whichever it becomes.

Its memory and data plane, the control loop on a thread of its own, the group on which the ranks talk, the leader's
line to the lighthouse and the port at which its other ranks find it.

Wiring: the control loop of one rank, and everything that lives on it.

The loop runs on its own thread, so a leader answers and a ring breaks while the main thread computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ft_hsdp import fault_injection, protocol, tls
from ft_hsdp.config import Config, agreed, config_hash
from ft_hsdp.control import exit_watch, watchdog
from ft_hsdp.control import leader as control
from ft_hsdp.control.exit_watch import process_space
from ft_hsdp.control.leader import Leader, LeaderOutlets, LeaderSettings
from ft_hsdp.control.lighthouse_client import LighthouseClient, own_address
from ft_hsdp.control.rank_channel import RankHub, RankLine
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.control.watchdog import Limits, Watchdog
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import Vote
from ft_hsdp.core.effects import Exit
from ft_hsdp.core.grant import Report
from ft_hsdp.core.replica_state import ReplicaPolicy
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import (
    EXIT_RETRYABLE,
    DataCorruption,
    FTARError,
    LighthouseUnreachable,
    LocalResourceError,
)
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.listener import MemberIdentity
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.settings import Settings as Ring
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankAlive, RankBeat, RankHello, RankLeaves, Telemetry
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.device import numerics
from ft_hsdp.train.gradients import Reducer
from ft_hsdp.train.identity import RankIdentity, RankPlace
from ft_hsdp.train.live_state import LiveState
from ft_hsdp.train.orders import Fetching, Mailbox, RankAgent
from ft_hsdp.train.snapshots import AgentHome, SnapshotWriter

if TYPE_CHECKING:
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane


@dataclass(frozen=True, slots=True)
class Common:
    """What all ranks of a replica know: their leader's port, the digest of each one's shard and layout, and their
    pids, if all run on one machine."""

    port: int
    weights: tuple[str, ...]
    layouts: tuple[str, ...]
    pids: tuple[int, ...] = ()


def ring_settings(config: Config) -> Ring:
    """How the rings of this job are to be."""
    ftar, timeouts = config.ftar, config.timeouts
    return Ring(
        ftar.transport,
        ftar.chunk_bytes,
        ftar.chunks,
        ftar.connections,
        timeout_s=ftar.timeout_s,
        connect_timeout_s=timeouts.connect_s,
        beat_s=timeouts.beat_s,
        silence_s=timeouts.silence_s,
    )


def device_plane(device: torch.device, arena: Arena, settings: Ring, largest: int) -> GpuPlane | None:
    """A data plane for fp32 messages of up to ``largest`` elements on ``device``; None: the CPU's will do.

    Raises:
        LocalSystemError: the device is at fault.
    """
    if device.type == "cpu":
        return None
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane  # triton is not needed elsewhere

    plane = GpuPlane(device, arena, settings.timeout_s)
    plane.reserve(settings.plan(largest, 4, 1), torch.float32)  # alone: no larger ring has larger chunks
    return plane


class RankGround:
    """One rank's. Made by the main threads of all ranks of a replica together, closed by them.

    ``weights``, ``layout``: digests of this rank's initial shard and of its layout; ``sizes``: of its buckets.
    """

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        device: torch.device,
        sizes: Sequence[int],
        weights: str,
        layout: str,
    ) -> None:
        self.place = place
        self.device = device
        self.sizes = tuple(sizes)
        self.arena = Arena()
        self.plane = device_plane(device, self.arena, ring_settings(config), max(sizes))
        self.crashed: Callable[[dict[str, Any]], None] = _crash
        self.received: Callable[[object], None] = lambda message: None
        self.lost: Callable[[int], None] = lambda rank: None
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: self.crashed(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="control", daemon=True)
        self._thread.start()
        self.client: LighthouseClient | None = None
        self.hub: RankHub | None = None
        self._greeting: asyncio.Task[None] | None = None
        port = self.call(self._lead(config)) if place.rank == 0 else 0
        self.ranks = ReplicaGroup(config.timeouts.ranks_s)
        mine = [port, weights, layout, os.getpid(), process_space()]
        told = [json.loads(each) for each in self.ranks.gather(json.dumps(mine).encode())]
        ports, all_weights, all_layouts, pids, spaces = zip(*told, strict=True)
        self.common = Common(ports[0], all_weights, all_layouts, pids if len(set(spaces)) == 1 else ())
        self.ranks.wait_for(config.timeouts.load_s)

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the loop and wait for it; each has its own deadline."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """End the thread; nothing on the loop is under way any more."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        if self.plane is not None:
            self.plane.close()

    async def _lead(self, config: Config) -> int:
        """Rank 0 talks to the lighthouse, and waits for its other ranks; the port to give them."""
        place = self.place
        context, ask_s = tls.client(config.network), config.timeouts.ask_s
        self.client = LighthouseClient(place.lighthouses, place.token, context, place.listed, ask_s)
        self.hub = RankHub(
            place.ranks, place.token, lambda message: self.received(message), lambda rank: self.lost(rank)
        )
        self._greeting = self.loop.create_task(self.client.greet())
        return await self.hub.listen(place.leader_host)


def _crash(context: dict[str, Any]) -> None:
    """Nothing on the loop may fail before the rank is wired: if it does, the rank ends."""
    error = context.get("exception")
    if isinstance(error, ConnectionError):
        return
    sys.stderr.write(f"control loop: {context.get('message')}\n")
    if error is not None:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(EXIT_RETRYABLE)


WRITES = 2  # x timeouts.load_s: for a checkpoint; ranks that wait for each other have given up by then
SILENT = 1.5  # x timeouts.evict_s: an order of the lighthouse, which knows more, comes first


class RankRuntime:
    """One rank's connections, once it knows its incarnation. Made by the main thread, closed by it."""

    def __init__(
        self, config: Config, ground: RankGround, life: RankIdentity, held: LiveState, mailbox: Mailbox
    ) -> None:
        place = ground.place
        self._config = config
        self._ground = ground
        self._place = place
        self._life = life
        self._held = held
        self._mailbox = mailbox
        self._ending = False
        self._progress = 0
        self._line: RankLine | None = None
        self._leader: Leader | None = None
        self.reporter = Reporter(life.incarnation, self._tell_lighthouse, self._beat)
        self._journal = Journal(
            place.run / "replicas" / str(life.replica) / "events.jsonl",
            self.reporter.event,
            source="replica",
            replica=life.replica,
            rank=place.rank,
            incarnation=life.incarnation,
        )
        self._loop = ground.loop
        ground.crashed, ground.received, ground.lost = self._crash, self._report, self._rank_lost
        home = AgentHome(place.token, life.replica, place.rank, place.ranks, life.starter)
        every_step = config.state.snapshot == "every_step"
        timeouts = config.timeouts
        self.keeper = SnapshotWriter(
            held, home, every_step, timeouts.agent_s, self._journal, self._failed, timeouts.agent_answer_s
        )
        self._ring_layout = state_id.digest(ground.sizes, config.ftar.chunk_bytes, config.ftar.chunks, place.ranks)
        self._agent: RankAgent
        self._vigil: Watchdog | None = None
        self._burying: asyncio.Task[None] | None = None
        self._call(self._open())

    @property
    def journal(self) -> Journal:
        """This rank's events."""
        return self._journal

    @property
    def reducer(self) -> Reducer:
        """The exchange of this rank's gradient."""
        return self._agent.reducer

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._ground.call(coroutine)

    def _crash(self, context: dict[str, Any]) -> None:
        """Nothing on the loop may fail: if it does, the rank stops, and with it the replica."""
        error = context.get("exception")
        if isinstance(error, ConnectionError) or self._ending:
            return
        if isinstance(error, LocalResourceError):
            sys.stderr.write(f"{error}\n")
            self._die(str(error), error.exit_code)
        sys.stderr.write(f"control loop: {context.get('message')}\n")
        if error is not None:
            traceback.print_exception(error)
        self._die("the control loop failed", error.exit_code if isinstance(error, FTARError) else EXIT_RETRYABLE)

    def _die(self, why: str, code: int = EXIT_RETRYABLE) -> None:
        """End this rank at once: a pending collective inside the replica cannot be cancelled."""
        if self._ending:
            return
        self._journal.event("RankEnded", why, code=code)
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)

    async def _open(self) -> None:
        config, place, life, ground = self._config, self._place, self._life, self._ground
        self.reporter.start()
        if life.predecessors and place.rank == 0:
            self._burying = self._loop.create_task(self._bury_predecessors())
        fetching = Fetching(
            place.ranks,
            self._held.layout.fingerprint,
            self._held.layout.nbytes,
            place.token,
            config.ftar.timeout_s,
        )
        agent = RankAgent(
            life.replica, place.rank, fetching, self._mailbox, self._journal, self._report, self.keeper, self._die
        )
        identity = MemberIdentity(life.replica, place.rank, self._ring_layout, place.token)
        settings = ring_settings(config)
        events = GroupEvents(agent.connected, agent.broken, agent.shown, self._token)
        agent.group = Group(identity, settings, events, ground.plane, ground.arena)
        self._ring_address = agent.group.listen(own_address(config.network.host, place.lighthouses[0]))
        agent.reducer = Reducer(
            agent.group, ground.sizes, life.replica, place.rank, self._voted, ground.device, self._checked
        )
        self._agent = agent

    def _report(self, message: object) -> None:
        """To the leader: a call on rank 0, a message elsewhere."""
        if isinstance(message, RankAlive):
            self._heard(message)
        elif isinstance(message, Telemetry):
            self.reporter.relay(message)
        elif self._leader is not None:
            self._leader.received(message)
        elif self._line is not None:
            self._line.send(message)

    def _heard(self, message: RankAlive) -> None:
        if self._vigil is not None:
            self._vigil.heard(message.rank)

    def _watch(self) -> Watchdog:
        """From now on this rank and whoever started it are watched, and its siblings hear of it."""
        place, timeouts = self._place, self._config.timeouts
        alive, hub, line = RankAlive(place.rank), self._ground.hub, self._line

        def say() -> None:
            if hub is not None:
                hub.broadcast(alive)
            elif line is not None:
                line.send(alive)

        limits = Limits(SILENT * timeouts.evict_s, timeouts.step_s, timeouts.stop_s)
        outlets = watchdog.WatchdogOutlets(say, self._got_on, self.leave, self._die)
        self._vigil = Watchdog(limits, outlets, place.parent)
        return self._vigil

    def _got_on(self) -> int | None:
        """How far the main thread has come; None while it waits for an order."""
        return None if self._mailbox.waited_for else self._progress

    def tell(self, message: object) -> None:
        """Report to the leader, from any thread."""
        self._loop.call_soon_threadsafe(self._report, message)

    def moved(self) -> None:
        """The main thread got on: it fed a batch, brought a bucket, changed the state. For that thread alone."""
        self._progress += 1

    def _beat(self) -> RankBeat:
        """This rank's sign of life."""
        return RankBeat(self._place.rank, os.getpid(), socket.gethostname(), self._progress)

    async def _tell_lighthouse(self, telemetry: Telemetry) -> None:
        """The leader tells the lighthouse, the other ranks tell their leader."""
        if self._ground.client is not None:
            await self._ground.client.tell(telemetry)
        elif self._line is not None:
            self._line.tell(telemetry)
        else:
            raise LighthouseUnreachable("this rank has not found its leader yet")

    def _voted(self, vote: Vote) -> None:
        """A vote goes out when this rank's snapshot of the state before is complete."""
        fault_injection.reach("vote", vote.fence.step)
        self.keeper.after(lambda: self.tell(replace(vote, kept=self.keeper.keeps(self._held.state))))

    def _checked(self, lineage_held: str) -> str:
        """The digest that goes with a vote; a rank whose own memory has changed ends before it votes."""
        try:
            return self._held.slice_digest(lineage_held)
        except DataCorruption as error:
            self._journal.event("StateCorrupt", str(error))
            self._die(str(error))
            raise

    def _failed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._crash, {"message": "the keeper failed", "exception": error})

    def _token(self, token: Any) -> None:
        if self._leader is not None:
            self._leader.token(token)

    # Check-in.

    def _rank_lost(self, rank: int) -> None:
        self._die(f"rank {rank} of this replica is gone")

    def check_in(self, state: StateId, wanted: int = 0) -> None:
        """All is warm: join with ``state``, and demand a checkpoint from step ``wanted`` on (0: demand none)."""
        self._call(self._check_in(state, wanted))

    async def _check_in(self, state: StateId, wanted: int) -> None:
        place, hub, port = self._place, self._ground.hub, self._ground.common.port
        state_address = self.keeper.address
        hello = RankHello(place.rank, self._ring_address, state_address)
        if hub is None:
            line = RankLine(place.token, self._ordered, lambda: self._die("the leader of this replica is gone"))
            async with asyncio.timeout(self._config.timeouts.ranks_s):
                await line.connect(place.leader_host, port, hello)
            self._line = line
            self._watch().expect([0])
            return
        watch = self._watch()  # those that are here early hear of their leader
        await hub.all_here(self._config.timeouts.ranks_s)
        watch.expect(range(1, place.ranks))
        self._have_exits_reported()
        hellos = [hello, *(hub.hellos[r] for r in range(1, place.ranks))]
        self._leader = self._lead(hellos, state, wanted)
        if self._burying is not None:
            await self._burying
        self._leader.start()

    def _lead(self, hellos: list[RankHello], state: StateId, wanted: int) -> Leader:
        config, life, client = self._config, self._life, self._ground.client
        assert client is not None
        quorum = config.quorum
        every, keeps = config.checkpoint.every, config.checkpoint.every > 0 or config.checkpoint.dir is not None
        train = config.train
        rules = ReplicaPolicy(every, quorum.catchup_log_steps, train.poison, keeps, train.poison_retries)
        replica = control.initial(life.replica, life.incarnation, config.train.steps, state, rules, wanted)
        about = protocol.QuorumRequest(
            Report(life.replica, life.incarnation, state, 1),
            tuple(h.ring for h in hellos),
            tuple(h.state for h in hellos),
            config_hash(config),
            state_id.digest(self._ground.common.layouts),
            numerics(self._ground.device),
            agreed(config),
        )
        outlets = LeaderOutlets(self._order_all, lambda token: self._agent.group.send_token(token), self._die)
        settings = leading(config, again=bool(life.predecessors))
        return Leader(replica, about, client, settings, outlets, self._journal)

    def _have_exits_reported(self) -> None:
        """Somebody else's launcher tells nobody that this replica's ranks are gone: a process of ours does."""
        place, pids = self._place, self._ground.common.pids
        if place.parent is None or not pids:
            return
        listed = None if place.listed is None else str(place.listed)
        watched = exit_watch.Watched(
            self._life.incarnation,
            pids,
            place.lighthouses,
            place.token,
            listed,
            self._config.network,
            self._config.timeouts.reach_s,
        )
        self._exit_watch = exit_watch.start(
            watched, place.run / "replicas" / str(self._life.replica) / "exit-watch.log"
        )

    async def _bury_predecessors(self) -> None:
        """Whoever restarted this replica ended its earlier incarnations first: say so to the lighthouse."""
        running: dict[int, str | None] = {self._life.replica: self._life.incarnation}
        assert self._ground.client is not None
        with contextlib.suppress(LighthouseUnreachable):  # the first ask will find out
            await self._ground.client.report(protocol.ProcessReport(running, self._life.predecessors))

    def _order_all(self, order: object) -> None:
        assert self._ground.hub is not None
        self._ground.hub.broadcast(order)
        self._ordered(order)

    def _ordered(self, order: object) -> None:
        if isinstance(order, RankAlive):
            self._heard(order)
            return
        if isinstance(order, Exit):
            self._ending = True  # from now on connections may close
        self._agent.order(order)

    # Later.

    def concluded(self) -> None:
        """The final state is written down: the leader may say so."""
        if self._leader is not None:
            self._loop.call_soon_threadsafe(self._leader.concluded.set)

    def leave(self) -> None:
        """Leave the job at the next commit; whoever has not checked in says so again then."""
        self.tell(RankLeaves(self._place.rank))

    def close(self) -> None:
        """Hang up and end the threads."""
        self._ending = True
        self._call(self._close())
        self.keeper.close()
        self._journal.close()

    async def _close(self) -> None:
        if self._vigil is not None:
            self._vigil.stop()
        await self._agent.group.close()
        await self.reporter.close()
        if self._leader is not None:
            self._leader.close()
        if self._ground.client is not None:
            await self._ground.client.close()
        if self._line is not None:
            self._line.close()
        if self._ground.hub is not None:
            self._ground.hub.close()
        await asyncio.sleep(0)
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        _, pending = await asyncio.wait(tasks, timeout=1.0) if tasks else ((), ())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def leading(config: Config, *, again: bool) -> LeaderSettings:
    """What a leader needs to know of ``config``; ``again``: its replica was started again.

    Then the job is under way, and its lighthouse is waited for as long as it takes.
    """
    timeouts = config.timeouts
    return LeaderSettings(
        ranks=config.ranks_per_replica,
        intervention=config.lr.intervention,
        chunk_bytes=config.ftar.chunk_bytes or 0,
        lease_s=config.quorum.lease_s,
        answer_wait_s=timeouts.answer_wait_s,
        join_timeout_s=None if again else timeouts.reach_s,
        token_timeout_s=config.ftar.timeout_s,
        catchup_wait_s=config.quorum.catchup_wait_s,
        reach_s=timeouts.reach_s,
        leave_s=timeouts.leave_s,
        write_s=WRITES * timeouts.load_s,
        write_again_s=timeouts.checkpoint_again_s,
    )
