"""Wiring: the control loop of one rank, and everything that lives on it.

The loop runs on its own thread, so a leader answers and a ring breaks while the main thread computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ft_hsdp import failpoints, protocol
from ft_hsdp.config import Config, config_hash
from ft_hsdp.control import leader as control
from ft_hsdp.control.channel import Hub, Line
from ft_hsdp.control.leader import Leader, Outlets, Settings
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core import lineage
from ft_hsdp.core.assignment import Report
from ft_hsdp.core.commit import Vote
from ft_hsdp.core.effects import Exit
from ft_hsdp.core.events import LeaveRequested
from ft_hsdp.core.lineage import StateId
from ft_hsdp.core.rules import Rules
from ft_hsdp.errors import EXIT_RETRYABLE, FTARError, LighthouseUnreachable
from ft_hsdp.events import Journal
from ft_hsdp.ftar.door import Identity
from ft_hsdp.ftar.events import Events
from ft_hsdp.ftar.group import Group
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.settings import Settings as Ring
from ft_hsdp.protocol import RankHello
from ft_hsdp.state.start import Starter
from ft_hsdp.train.agent import Fetching, RankAgent
from ft_hsdp.train.device import numerics
from ft_hsdp.train.held import Held
from ft_hsdp.train.keeper import Home, Keeper
from ft_hsdp.train.mailbox import Mailbox
from ft_hsdp.train.reducer import Reducer

if TYPE_CHECKING:
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane

JOIN_TIMEOUT_S = 10.0
AGENT_S = 10.0
RANKS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Who this rank is, and where its job lives; ``starter`` if it is the one that starts the state agent."""

    replica: int
    rank: int
    ranks: int
    incarnation: str
    predecessors: tuple[str, ...]
    run: Path
    lighthouse: str
    token: str
    leader_host: str
    starter: Starter | None


def ring_settings(config: Config) -> Ring:
    """How the rings of this job are to be."""
    ftar = config.ftar
    return Ring(
        ftar.transport,
        ftar.chunk_bytes,
        ftar.chunks,
        ftar.connections,
        timeout_s=ftar.timeout_s,
        connect_timeout_s=ftar.connect_timeout_s,
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


class Wiring:
    """One rank's connections. Made by the main thread, closed by it."""

    def __init__(
        self,
        config: Config,
        place: Place,
        held: Held,
        sizes: tuple[int, ...],
        mailbox: Mailbox,
        device: torch.device,
    ) -> None:
        self._config = config
        self._device = device
        self._arena = Arena()
        self._plane = device_plane(device, self._arena, ring_settings(config), max(sizes))
        self._place = place
        self._held = held
        self._mailbox = mailbox
        self._ending = False
        self._journal = Journal(
            place.run / "replicas" / str(place.replica) / "events.jsonl",
            source="replica",
            replica=place.replica,
            rank=place.rank,
            incarnation=place.incarnation,
        )
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._crash)
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._thread.start()
        self._hub: Hub | None = None
        self._line: Line | None = None
        self._leader: Leader | None = None
        home = Home(place.token, place.replica, place.rank, place.ranks, place.starter)
        every_step = config.state.snapshot == "every_step"
        self.keeper = Keeper(held, home, every_step, AGENT_S, self._journal, self._failed)
        self._ring_layout = lineage.digest(sizes, config.ftar.chunk_bytes, config.ftar.chunks, place.ranks)
        self._agent: RankAgent
        self._call(self._open(sizes))

    @property
    def journal(self) -> Journal:
        """This rank's events."""
        return self._journal

    @property
    def reducer(self) -> Reducer:
        """The exchange of this rank's gradient."""
        return self._agent.reducer

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the loop and wait for it; each has its own deadline."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Nothing on the loop may fail: if it does, the rank stops, and with it the replica."""
        error = context.get("exception")
        if isinstance(error, ConnectionError) or self._ending:
            return
        sys.stderr.write(f"control loop: {context.get('message')}\n")
        if error is not None:
            traceback.print_exception(error)
        self._die("the control loop failed", error.exit_code if isinstance(error, FTARError) else EXIT_RETRYABLE)

    def _die(self, why: str, code: int = EXIT_RETRYABLE) -> None:
        """End this rank at once: a pending collective inside the replica cannot be cancelled."""
        if self._ending:
            return
        self._journal.event("RankEnded", why, code=code)
        sys.stderr.flush()
        os._exit(code)

    async def _open(self, sizes: tuple[int, ...]) -> None:
        config, place = self._config, self._place
        fetching = Fetching(
            place.ranks,
            self._held.layout.fingerprint,
            self._held.layout.nbytes,
            place.token,
            config.ftar.timeout_s,
        )
        agent = RankAgent(
            place.replica, place.rank, fetching, self._mailbox, self._journal, self._report, self.keeper
        )
        identity = Identity(place.replica, place.rank, self._ring_layout, place.token)
        settings = ring_settings(config)
        events = Events(agent.connected, agent.broken, agent.shown, self._token)
        agent.group = Group(identity, settings, events, self._plane, self._arena)
        self._ring_address = agent.group.listen(config.network.host)
        checked = self._held.slice_digest
        agent.reducer = Reducer(agent.group, sizes, place.replica, place.rank, self._voted, self._device, checked)
        self._agent = agent

    def _report(self, message: object) -> None:
        """To the leader: a call on rank 0, a message elsewhere."""
        if self._leader is not None:
            self._leader.received(message)
        elif self._line is not None:
            self._line.send(message)

    def tell(self, message: object) -> None:
        """Report to the leader, from any thread."""
        self._loop.call_soon_threadsafe(self._report, message)

    def _voted(self, vote: Vote) -> None:
        """A vote goes out when this rank's snapshot of the state before is complete."""
        failpoints.reach("vote", vote.fence.step)
        self.keeper.after(lambda: self.tell(vote))

    def _failed(self, error: BaseException) -> None:
        context = {"message": "the keeper failed", "exception": error}
        self._loop.call_soon_threadsafe(self._crash, self._loop, context)

    def _token(self, token: Any) -> None:
        if self._leader is not None:
            self._leader.token(token)

    # Check-in.

    def listen(self) -> int:
        """Rank 0 waits for its other ranks; the port to give them."""
        return int(self._call(self._listen()))

    async def _listen(self) -> int:
        self._hub = Hub(self._place.ranks, self._place.token, self._report, self._rank_lost)
        return await self._hub.listen(self._place.leader_host)

    def _rank_lost(self, rank: int) -> None:
        self._die(f"rank {rank} of this replica is gone")

    def check_in(self, port: int, state: StateId, layout: str) -> None:
        """All is warm: join the job with ``state``; ``layout`` fingerprints the shards of all ranks."""
        self._call(self._check_in(port, state, layout))

    async def _check_in(self, port: int, state: StateId, layout: str) -> None:
        place = self._place
        state_address = self.keeper.address
        mac = protocol.mac(place.token, "rank", place.rank, self._ring_address, state_address)
        hello = RankHello(place.rank, self._ring_address, state_address, mac)
        if place.rank != 0:
            self._line = Line(self._ordered, lambda: self._die("the leader of this replica is gone"))
            async with asyncio.timeout(RANKS_TIMEOUT_S):
                await self._line.connect(place.leader_host, port, hello)
            return
        assert self._hub is not None
        await self._hub.all_here(RANKS_TIMEOUT_S)
        hellos = [hello, *(self._hub.hellos[r] for r in range(1, place.ranks))]
        self._leader = self._lead(hellos, state, layout)
        if place.predecessors:
            await self._bury_predecessors()
        self._leader.start()

    def _lead(self, hellos: list[RankHello], state: StateId, layout: str) -> Leader:
        config, place = self._config, self._place
        quorum = config.quorum
        rules = Rules(config.checkpoint.every, quorum.catchup_log_steps, config.train.poison)
        replica = control.initial(place.replica, place.incarnation, config.train.steps, state, rules)
        about = protocol.Ask(
            Report(place.replica, place.incarnation, state, 1),
            tuple(h.ring for h in hellos),
            tuple(h.state for h in hellos),
            config_hash(config),
            layout,
            numerics(self._device),
        )
        settings = Settings(
            place.ranks,
            config.replicas,
            config.lr.intervention,
            config.ftar.chunk_bytes or 0,
            quorum.lease_s,
            quorum.answer_wait_s,
            JOIN_TIMEOUT_S,
            config.ftar.timeout_s,
            quorum.catchup_wait_s,
        )
        self._client = LighthouseClient(place.lighthouse, place.token)
        outlets = Outlets(self._order_all, lambda token: self._agent.group.send_token(token))
        return Leader(replica, about, self._client, settings, outlets, self._journal)

    async def _bury_predecessors(self) -> None:
        """Whoever restarted this replica ended its earlier incarnations first: say so to the lighthouse."""
        running: dict[int, str | None] = {self._place.replica: self._place.incarnation}
        with contextlib.suppress(LighthouseUnreachable):  # the first ask will find out
            await self._client.report(protocol.Processes(running, self._place.predecessors))

    def _order_all(self, order: object) -> None:
        assert self._hub is not None
        self._hub.broadcast(order)
        self._ordered(order)

    def _ordered(self, order: object) -> None:
        if isinstance(order, Exit):
            self._ending = True  # from now on connections may close
        self._agent.order(order)

    # Later.

    def concluded(self) -> None:
        """The final state is written down: the leader may say so."""
        if self._leader is not None:
            self._loop.call_soon_threadsafe(self._leader.concluded.set)

    def leave(self) -> None:
        """Leave the job at the next commit."""
        if self._leader is not None:
            self._loop.call_soon_threadsafe(self._leader.handle, LeaveRequested())

    def close(self) -> None:
        """Hang up and end the threads."""
        self._ending = True
        self._call(self._close())
        self.keeper.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._plane is not None:
            self._plane.close()

    async def _close(self) -> None:
        await self._agent.group.close()
        if self._leader is not None:
            self._leader.close()
            await self._client.close()
        if self._line is not None:
            self._line.close()
        if self._hub is not None:
            self._hub.close()
        await asyncio.sleep(0)
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        _, pending = await asyncio.wait(tasks, timeout=1.0) if tasks else ((), ())
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
