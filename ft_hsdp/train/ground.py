"""Ground: what a rank has before it knows which replica it is, and keeps whichever it becomes.

Its memory and data plane, the control loop on a thread of its own, the group on which the ranks talk, the leader's
line to the lighthouse and the port at which its other ranks find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ft_hsdp import tls
from ft_hsdp.config import Config
from ft_hsdp.control.exit_watch import process_space
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.control.rank_channel import RankHub
from ft_hsdp.errors import EXIT_RETRYABLE
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.settings import Settings as Ring
from ft_hsdp.state.replica_group import Ranks

if TYPE_CHECKING:
    from ft_hsdp.ftar.dataplane.gpu import GpuPlane


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank is: in a replica of ``ranks``, at ``leader_host``, in the job of ``run``.

    ``starts_agent``: it is the first of its host, and starts the state agent there. ``listed``: the file that the
    lighthouses' addresses are from, if it is one. ``parent``: who started this rank, if that is to be watched.
    """

    rank: int
    ranks: int
    run: Path
    lighthouses: tuple[str, ...]
    token: str
    leader_host: str
    starts_agent: bool
    listed: Path | None = None
    parent: int | None = None


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


class Ground:
    """One rank's. Made by the main threads of all ranks of a replica together, closed by them.

    ``weights``, ``layout``: digests of this rank's initial shard and of its layout; ``sizes``: of its buckets.
    """

    def __init__(
        self, config: Config, place: Place, device: torch.device, sizes: Sequence[int], weights: str, layout: str
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
        self.ranks = Ranks(config.timeouts.ranks_s)
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
