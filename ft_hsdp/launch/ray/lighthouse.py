"""The lighthouse of a job on a cluster: a named actor on the driver's node, which Ray restarts.

The actor starts the same process as `up`, in the run's folder. After a restart the lighthouse reads its journal
and listens at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ft_hsdp.config import load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.lighthouse_process import LighthouseFailed, LighthouseFleet
from ft_hsdp.launch.ray.cluster import cause
from ft_hsdp.launch.ray.placement import prefix
from ft_hsdp.launch.run import status
from ft_hsdp.launch.run.directory import Row, RunDir, read_json, supervised

IDLE_S = 2.0  # `news` answers after this time at the latest
POLL_S = 0.05
SLOWEST_S = 5.0  # longest wait between two attempts
STOP_S = 5.0


def actor_name(job: str) -> str:
    return f"{prefix(job)}-lighthouse"


class LighthouseActor:
    """Runs the lighthouse's process on the driver's node."""

    def __init__(self, run: str) -> None:
        """Open the run directory `run`; nothing is started."""
        self._run = RunDir(Path(run))
        self._events: list[Row] = []
        self._fleet: LighthouseFleet | None = None
        self._starting = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, ...]:
        """Start the lighthouse if it does not run, and return its URLs. Raises FtHsdpError."""
        async with self._starting:
            if self._fleet is None:
                config = load(self._run.config)
                named = self._run.seat(0) if config.lighthouse.etcd else self._run.lighthouse
                recorded = read_json(named)  # where it listened before this actor was started again
                if isinstance(recorded, dict) and recorded.get("url"):
                    network = config.network.model_copy(update={"port": urlsplit(recorded["url"]).port})
                    config = config.model_copy(update={"network": network})
                fleet = LighthouseFleet(self._run, config, self._events.append)
                await fleet.start()
                self._fleet = fleet
                self._keeping = asyncio.create_task(fleet.keep())
        return self._fleet.urls

    async def news(self) -> list[Row]:
        """Return the events since the last answer; wait up to `IDLE_S` for the first one."""
        until = time.monotonic() + IDLE_S
        while not self._events and time.monotonic() < until:  # noqa: ASYNC110 - they come into a plain list
            await asyncio.sleep(POLL_S)
        events = list(self._events)
        del self._events[: len(events)]
        return events

    async def status(self) -> tuple[status.Status, list[str]]:
        """Return the job's status, and the lines that show it to people."""
        picture = await asyncio.to_thread(status.status, self._run)
        return picture, status.lines(self._run, picture)

    async def stop(self) -> None:
        """End the lighthouse's process."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._fleet is not None:
            await self._fleet.stop()


class RayLighthouse:
    """The lighthouse as the job's supervisor sees it."""

    def __init__(self, run: RunDir, node: str, emit: Callable[[Row], None]) -> None:
        """Prepare a lighthouse that does not run yet.

        Args:
            run: The run directory.
            node: Ray's id of the node for its actor.
            emit: Takes each event.
        """
        self._run = run
        self._node = node
        self._emit = emit
        self._actor: Any = None
        self.urls: tuple[str, ...] = ()  # where it listens: the same after each restart

    async def start(self) -> None:
        """Start the actor and the lighthouse.

        Raises:
            ConfigError: A running job of the cluster has this name.
            LighthouseFailed: The lighthouse does not start.
        """
        try:
            self._actor = self._make()
        except ValueError:
            allowed = "a name that no running job of this cluster has"
            raise ConfigError("job.name", self._run.name, allowed) from None
        try:
            self.urls = tuple(await self._actor.start.remote())
        except RayError as error:
            raise cause(error) from None

    async def keep(self) -> None:
        """Emit its events, and restart it when its actor dies, until cancelled."""
        while True:
            try:
                for event in await self._actor.news.remote():
                    self._emit(event)
            except RayError as error:
                self._event("LighthouseExited", f"its actor is gone ({cause(error)}); Ray starts it again")
                await self._restart()
                self._event("LighthouseExited", f"it listens at {self.urls[0]} again", over=True)

    async def stop(self) -> None:
        if self._actor is None:
            return
        stopping = asyncio.ensure_future(self._actor.stop.remote())
        await asyncio.wait([stopping], timeout=STOP_S)
        if stopping.done():
            stopping.exception()  # read it, so that asyncio does not log it: the actor may be dead already
        else:
            stopping.cancel()
        ray.kill(self._actor)

    async def _restart(self) -> None:
        """Start the lighthouse in the actor that Ray restarted, or in a new one, until it listens again."""
        wait_s = POLL_S
        while True:
            try:
                if tuple(await self._actor.start.remote()) == self.urls:
                    return
            except RayError as error:
                if isinstance(cause(error), LighthouseFailed):
                    self._event("LighthouseFailed", str(cause(error)))
            await asyncio.sleep(wait_s)
            wait_s = min(SLOWEST_S, 2 * wait_s)
            with contextlib.suppress(ValueError):  # Ray still has an actor of this name
                self._actor = self._make()

    def _make(self) -> Any:
        """Create the actor. Raises ValueError if the cluster has one of this name."""
        options = {
            "name": actor_name(self._run.name),
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node, soft=False),
            "enable_task_events": False,
            "max_concurrency": 100,
        }
        return ray.remote(LighthouseActor).options(**options).remote(str(self._run.path))

    def _event(self, name: str, reason: str, **fields: Any) -> None:
        self._emit(supervised(name, reason, **fields))
