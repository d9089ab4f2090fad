"""The runtime of one rank: its control loop, and the connections that live on it.

A rank has two threads of its own that matter. The main thread runs the user's loop: forward, backward, and the
orders that it takes from the `Mailbox`. The control loop, an asyncio loop on a thread of its own, does everything
that must not wait for the main thread: it answers the leader, forms and leaves rings, sends signs of life and, on
rank 0, runs the leader and asks the lighthouse. So a ring breaks and a leader answers while the main thread
computes.

`RankRuntime` is made once for each rank, in two stages, both on the main thread. The constructor makes what does
not depend on the replica: memory, data plane, loop, the way to the lighthouse and to the other ranks. A spare has
all that ready. `start` adds what belongs to one incarnation: journal, snapshots, ring and reducer. `join`
joins the job. The way of one order is `Leader` -> `RankZero.broadcast` -> `RankRuntime` -> `OrderHandler.handle`
-> `Mailbox` or `Reducer`; the way of a vote is `Reducer` -> `RankRuntime.send_vote` -> `Bus.to_leader` ->
`Leader.received`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import torch
import uvloop

from ft_hsdp import fault_injection
from ft_hsdp.config import Config, agreed, config_hash
from ft_hsdp.control import exit_watch, sensors
from ft_hsdp.control.lighthouse_client import own_address
from ft_hsdp.control.telemetry import Reporter
from ft_hsdp.control.watchdog import Limits, Watchdog
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import Vote
from ft_hsdp.core.effects import BufferUpdate, Commit, Exit
from ft_hsdp.core.events import Leaving
from ft_hsdp.core.grant import Grant, Holders, Report, ranges
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import (
    EXIT_RETRYABLE,
    DataCorruption,
    FTARError,
    LocalResourceError,
)
from ft_hsdp.ftar.connections import MemberIdentity
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.settings import Settings as RingSettings
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.jsonl import Journal
from ft_hsdp.lifetime import leave
from ft_hsdp.protocol import (
    QuorumRequest,
    RankAlive,
    RankBeat,
    RankBroken,
    RankHello,
    RankLeaves,
    RankShown,
    RingAbort,
)
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.device import device_plane, device_summaries, numerics, pci_address
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.gradients import Reducer
from ft_hsdp.train.identity import RankIdentity, RankPlace, host_name
from ft_hsdp.train.lanes import GradientLanes, LanePlan, one_lane, wires
from ft_hsdp.train.loop.user_loop import Pauses
from ft_hsdp.train.orders import Fetching, Mailbox, OrderHandler
from ft_hsdp.train.rank_zero import Bus, OtherRank, RankZero, ReplicaFacts, replica_policy, same_data
from ft_hsdp.train.state.copies import CopyKeeper, SpanWatch
from ft_hsdp.train.state.copy_plan import CopiedShard, CopyPlanner, checked_room
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.state.snapshots import AgentHome, SnapshotWriter
from ft_hsdp.train.tracer import Tracer

BEATS = 3  # of a watch beside the ranks, in timeouts.evict_s
TOLD_S = 0.001  # a shorter wait for a snapshot is none
SILENT = 1.5  # x timeouts.evict_s: an order of the lighthouse, which knows more, comes first


class RankRuntime:
    """The control loop of one rank, its ring and its reducer: made, started and closed by its main thread."""

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        device: torch.device,
        model: AdoptedModel,
        live_state: LiveState,
        mailbox: Mailbox,
        pauses: Pauses,
        data: Mapping[str, str],
    ) -> None:
        """Make all that does not depend on the replica. A collective: blocks until all ranks of it are here.

        Raises:
            ConfigError: The ranks of the replica have different data.
            LocalSystemError: The device is at fault.
            FtHsdpError: The other ranks did not come within `timeouts.ranks_s`.
        """
        self.config = config
        self.place = place
        self._device = device
        self.model = model
        self._sizes = tuple(model.sizes)
        self.live_state = live_state
        self._mailbox = mailbox
        self._ending = False  # from now on connections may close
        self._started = False  # `start` is done
        self._progress = 0  # what the main thread has got done: see `moved`
        self.snapshot_s = 0.0  # for which the newest vote waited for the snapshot of the state before
        self._pauses = pauses
        pauses.lend(self._lent)
        self._arena = Arena()
        self._wires = wires(config, model)
        self._plane = device_plane(device, self._arena, RingSettings.of(config), max(model.sizes), self._wires[0])
        self._loop = uvloop.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: self._crash(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._thread.start()
        self._watchdog: Watchdog | None = None
        # Set by `start`.
        self.identity: RankIdentity
        self._journal: Journal | None = None
        self.reporter: Reporter
        self.snapshots: SnapshotWriter
        self.copies: CopyKeeper
        self.spans: SpanWatch
        self.reducer: Reducer
        self._group: Group
        self._orders: OrderHandler
        self._tracer: Tracer
        self._sensors: sensors.Sensors

        self._bus: Bus
        port = self._call(self._listen())
        self.ranks = ReplicaGroup(config.timeouts.ranks_s)
        live_state.describe_frozen(self.ranks)
        digests = live_state.weights_digest(), live_state.layout.fingerprint
        here = host_name(os.environ), exit_watch.process_space(), os.getpid()
        mine = [port, *digests, here, live_state.layout.nbytes, data]
        gathered = [json.loads(each) for each in self.ranks.gather(json.dumps(mine).encode())]
        ports, weights, layouts, places, sizes_of_shards, told = zip(*gathered, strict=True)
        self._shards = [CopiedShard(*each) for each in zip(layouts, sizes_of_shards, strict=True)]
        checked_room(config.memory.budget_gb, self._shards)
        watched = exit_watch.shares(places, place.rank)
        self.facts = ReplicaFacts(ports[0], weights, layouts, *watched, same_data(told))
        self.ranks.wait_for(config.timeouts.load_s)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` on the control loop and wait for it; each has its own deadline."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # The main thread.

    def start(self, identity: RankIdentity) -> None:
        """Become a rank of one incarnation: open its journal and snapshots, and listen for its neighbours.

        Blocks for at most `timeouts.agent_s`.
        """
        config, place, timeouts = self.config, self.place, self.config.timeouts
        self.identity = identity
        self._tracer = Tracer(identity.replica)
        folders = {"run": place.run, "checkpoint": config.checkpoint.dir} if place.local_rank == 0 else None
        self._sensors = sensors.Sensors(sensors.of_rank(pci_address(self._device), folders))
        self.reporter = Reporter(identity.incarnation, self._bus.tell, self._beat)
        self._journal = Journal(
            place.run / "replicas" / str(identity.replica) / "events.jsonl",
            self.reporter.event,
            source="replica",
            replica=identity.replica,
            rank=place.rank,
            incarnation=identity.incarnation,
        )
        self.snapshots = SnapshotWriter(
            self.live_state,
            AgentHome(place.token, identity.replica, place.rank, place.ranks, identity.starter, identity.shared),
            config.state.snapshot == "every_step",
            timeouts.agent_s,
            self._journal,
            self._snapshots_failed,
            timeouts.agent_answer_s,
        )
        copied, limit_s = config.state.snapshot == "every_step", config.ftar.timeout_s
        planner = CopyPlanner(identity.replica, place.rank, config.memory, self._shards, limit_s, copied)
        self.copies = CopyKeeper(
            planner,
            config.replicas,
            self.snapshots,
            self._journal,
            lambda error: self.end(str(error), error.exit_code),
            not identity.restarts,
        )
        self.spans = SpanWatch(self.model.watch, self.snapshots, self._journal)
        self._call(self._open(identity))
        self._started = True

    def holders(self, wait_s: float) -> Holders | None:
        """Ask the lighthouse where copies of the newest state may be. On rank 0; blocks for about ``wait_s``."""
        assert isinstance(self._bus, RankZero)
        found: Holders | None = self._call(self._bus.client.find_holders(self.identity.replica, wait_s))
        return found

    def _lent(self) -> contextlib.AbstractContextManager[None]:
        """Lend the state to the user's code, when what is due is copied. Blocks until then."""
        return self.live_state.lent(self.snapshots.wait)

    def join(self, state: StateId, wanted: int = 0) -> None:
        """Join the job with ``state``. Blocks until all ranks of the replica have checked in.

        Args:
            wanted: Demand a checkpoint of a state of so many steps or more; 0: demand none.
        """
        self._call(self._join(state, wanted))

    def moved(self) -> None:
        """Note that the main thread got on: it fed a batch, brought a bucket or changed the state."""
        self._progress += 1

    @property
    def _done(self) -> int:
        return self._progress + self._pauses.ended

    def concluded(self) -> None:
        """Let the leader tell the lighthouse that the replica has ended: the final state is written down."""
        if isinstance(self._bus, RankZero) and self._bus.leader is not None:
            self._loop.call_soon_threadsafe(self._bus.leader.concluded.set)

    def leave(self, how: Leaving = "told") -> None:
        """Leave the job at the next commit. From any thread; before check-in it has no effect and is repeated."""
        self.report(RankLeaves(self.place.rank, how))

    def report(self, message: object) -> None:
        """Send ``message`` to the leader; from any thread, does not block."""
        self._loop.call_soon_threadsafe(self._bus.to_leader, message)

    def close(self) -> None:
        """Close all connections and end all threads. Blocks for about a second at most."""
        self._ending = True
        self._call(self._close())
        if self._started:
            self.copies.close()
            self.snapshots.close()
        if self._journal is not None:
            self._journal.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._plane is not None:
            self._plane.close()

    @property
    def journal(self) -> Journal:
        assert self._journal is not None
        return self._journal

    # FTAR's thread: what the reducer calls.

    def send_vote(self, vote: Vote) -> None:
        """Send a vote to the leader when this rank's snapshot of the state before is complete or left out.

        It waits for the copies that its host makes of other hosts' shards, too.
        """
        fault_injection.reach("vote", vote.fence.step)
        began = time.monotonic()

        def snapshot_done() -> None:
            state = self.live_state.state
            assert state is not None
            waited_s = time.monotonic() - began
            self.snapshot_s = waited_s if waited_s > TOLD_S else 0.0
            self.copies.vote(vote, state, sent)

        def sent(final: Vote) -> None:
            self.report(final)
            self._tracer.voted(vote.fence.epoch, vote.fence.step)

        self.snapshots.after(snapshot_done)

    def _compared(self, lineage: str, plan: LanePlan) -> list[str]:
        """Return the digests that go with a vote; a rank whose own memory has changed ends before it votes."""
        try:
            held = self.live_state.slice_digest(lineage)
        except DataCorruption as error:
            self.journal.event("StateCorrupt", str(error))
            self.end(str(error))
            raise
        if not held:
            return []
        return self.live_state.lane_digests(plan) if plan.cut else [held]

    # The control loop: the leader's orders.

    def end(self, reason: str, code: int = EXIT_RETRYABLE) -> None:
        """End this process at once, and with it the replica, unless the rank is ending anyway. From any thread.

        It does not return: a collective inside the replica that is under way cannot be cancelled.
        """
        if self._ending:
            return
        if self._journal is not None:
            self._journal.event("RankEnded", reason, code=code)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{reason}\n")  # the last line of its log is what the supervisor tells
        leave(code)

    def _take(self, order: object) -> None:
        if isinstance(order, RankAlive):
            if self._watchdog is not None:
                self._watchdog.heard(order.rank)
            self._pauses.told(order.rank, min(order.pause_ms / 1000, self.config.timeouts.pause_s))
            return
        if isinstance(order, Exit):
            self._ending = True
        if isinstance(order, Commit | BufferUpdate):
            self._tracer.committed(order.record.step)
        self._orders.handle(order)

    def _beat(self) -> RankBeat:
        pause, state = self._pauses.what, self.live_state.state
        if state is not None:
            self._tracer.committed(state.step)
        usual = "waits for an order" if self._mailbox.waited_for else "trains"
        epoch, rings = self._group.epoch, self._group.traces()
        trace = self._tracer.trace(epoch, rings, self._done, pause or usual, paused=bool(pause))
        where = self.place.rank, os.getpid(), host_name(os.environ)
        return RankBeat(*where, self._done, pause, self._tracer.still_s, trace, load=self._sensors.newest())

    # The control loop: what the ring reports.

    def _ring_connected(self, epoch: int) -> None:
        self.journal.event("RingConnected", "both neighbours are in this epoch", epoch=epoch)

    def _ring_broken(self, abort: RingAbort) -> None:
        """Report a broken ring; end the rank if its own trainer hangs: only a new process helps."""
        if abort.stuck and abort.suspect == self.identity.replica:
            self.end(f"the trainer hangs: {abort.cause}")
            return
        rank = self.place.rank
        self._bus.to_leader(
            RankBroken(rank, abort.epoch, abort.cause, abort.suspect, abort.planned, abort.accuser)
        )

    def _grant_shown(self, grant: Grant) -> None:
        self._bus.to_leader(RankShown(self.place.rank, grant))

    # The control loop: failures.

    def _crash(self, context: dict[str, Any]) -> None:
        """End the rank: nothing on the loop may fail, except a connection."""
        error = context.get("exception")
        if isinstance(error, ConnectionError) or self._ending:
            return
        if isinstance(error, LocalResourceError):
            self.end(str(error), error.exit_code)
        if error is not None:
            traceback.print_exception(error)
        why = f"the control loop failed: {context.get('message')}" + (f": {error}" if error is not None else "")
        self.end(why, error.exit_code if isinstance(error, FTARError) else EXIT_RETRYABLE)

    def _snapshots_failed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self._crash, {"message": "a snapshot failed", "exception": error})

    # `say_alive`, `main_progress`, `leave` and `end` are the `WatchedRank` of the watchdog.

    def _watch(self) -> Watchdog:
        """Watch this rank and its parent from now on, and tell the other ranks that it lives."""
        timeouts = self.config.timeouts
        limits = Limits(SILENT * timeouts.evict_s, timeouts.step_s, timeouts.stop_s)
        self._watchdog = Watchdog(limits, self, self.place.parent)
        return self._watchdog

    def say_alive(self) -> None:
        rank, pauses = self.place.rank, self._pauses
        pause_s = pauses.left_s() if rank else pauses.replica_left_s()
        self._bus.to_ranks(RankAlive(rank, math.ceil(1000 * pause_s)))

    def main_progress(self) -> int | None:
        return None if self._mailbox.waited_for or self._pauses.replica_left_s() else self._done

    # The control loop: start, check-in and end.

    async def _listen(self) -> int:
        config, place = self.config, self.place
        if place.rank:
            self._bus = OtherRank(place, self._take, self.end)
            return 0
        zero = self._bus = RankZero(config, place, self._take, self.end)
        return await zero.hub.listen(place.leader_host)

    async def _open(self, identity: RankIdentity) -> None:
        config, place, layout = self.config, self.place, self.live_state.layout
        self.reporter.start()
        if isinstance(self._bus, RankZero):
            self._bus.start(identity, self.reporter)
        ring_layout = state_id.digest(
            self._sizes,
            config.ftar.chunk_bytes,
            config.ftar.chunks,
            place.ranks,
            *[config.ftar.dtype] * any(self._wires),
        )
        member = MemberIdentity(identity.replica, place.rank, ring_layout, place.token)
        usual = one_lane(member.lanes()[0], self._sizes, self.live_state.counted)
        sizes = config.ftar.chunk_bytes, config.ftar.chunks
        lanes = GradientLanes(self.model.rows, usual, place.ranks, place.rank, sizes)
        group = self._group = Group(
            member,
            RingSettings.of(config),
            GroupEvents(self._ring_connected, self._ring_broken, self._grant_shown, self._bus.to_leader),
            self._plane,
            self._arena,
            self._pauses.replica_left_s,
            lanes.of,
        )
        key, where = config.network.of_rank(place.local_rank)
        self._ring_address = group.listen(own_address(where, place.lighthouses[0], key))
        self.reducer = Reducer(
            group,
            lanes,
            identity.replica,
            place.rank,
            self.send_vote,
            self._device,
            self._compared,
            self.spans.meter,
            device_summaries(self._device),
            self._wires,
        )
        self._orders = OrderHandler(
            identity.replica,
            place.rank,
            Fetching(place.ranks, layout, place.token, config.ftar.timeout_s),
            group,
            self.reducer,
            self.snapshots,
            self.copies,
            self.spans,
            self._mailbox,
            self.journal,
            self._bus.to_leader,
        )

    async def _join(self, state: StateId, wanted: int) -> None:
        config, place, bus = self.config, self.place, self._bus
        hello = RankHello(place.rank, self._ring_address, self.snapshots.address, self.identity.host)
        if isinstance(bus, OtherRank):
            await bus.connect(self.facts.port, hello, config.timeouts.ranks_s)
            self._watch().expect([0])
            self._have_exits_reported()
            return
        watch = self._watch()  # those that are here early hear of their leader
        await bus.hub.all_here(config.timeouts.ranks_s)
        watch.expect(range(1, place.ranks))
        hellos = [hello, *(bus.hub.hellos[rank] for rank in range(1, place.ranks))]
        about = self._about(state, hellos)
        self._have_exits_reported()
        policy = replica_policy(config, 4 * sum(self._sizes))
        await bus.lead(about, wanted, policy, self._group.send_token, self.journal)

    def _have_exits_reported(self) -> None:
        """Start a process that tells the lighthouse when the ranks of this host are gone, on the first of them.

        Under our own supervisor that is its task; another launcher does not do it.
        """
        place, facts, timeouts = self.place, self.facts, self.config.timeouts
        if place.parent is None or not facts.pids:
            return
        folder = place.run / "replicas" / str(self.identity.replica)
        host = host_name(os.environ)
        watched = exit_watch.Watched(
            self.identity.incarnation,
            host,
            facts.machines,
            facts.pids,
            place.lighthouses,
            place.token,
            str(folder / "final.json"),
            None if place.listed is None else str(place.listed),
            self.config.network,
            timeouts.reach_s,
            timeouts.evict_s / BEATS,
        )
        self._exit_watch = exit_watch.start(watched, folder / f"exit-watch-{host}.log")

    def _about(self, state: StateId, hellos: Sequence[RankHello]) -> QuorumRequest:
        """Return what the leader's requests say of this replica; ``hellos`` are those of its ranks."""
        config, identity, live_state = self.config, self.identity, self.live_state
        layout = state_id.digest(self.facts.layouts)
        if config.memory.shrink_to is not None:  # a replica may have another number of ranks than before
            layout = state_id.digest(live_state.layout.whole, config.ranks_per_replica)
        return QuorumRequest(
            Report(identity.replica, identity.incarnation, state, 1),
            tuple(hello.ring for hello in hellos),
            tuple(hello.state for hello in hellos),
            config_hash(config),
            layout,
            numerics(self._device),
            agreed(config),
            live_state.frozen_digest(),
            ranges(hello.host for hello in hellos),
            dict(self.facts.data),
        )

    async def _close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._started:
            self._sensors.close()
            await self._group.close()
            await self.reporter.close()
        await self._bus.close()
        await asyncio.sleep(0)
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        _, pending = await asyncio.wait(tasks, timeout=1.0) if tasks else ((), ())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
