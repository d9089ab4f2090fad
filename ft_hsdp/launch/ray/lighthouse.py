"""The lighthouse of a job in a cluster: a named actor that Ray starts again, on the driver's node.

The lighthouse itself is the process that `up` starts, in the run's own folder: started again, it reads its journal
and listens where it was.
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
from ft_hsdp.launch.ray.placement import prefix
from ft_hsdp.launch.ray.slot import cause
from ft_hsdp.launch.run import status
from ft_hsdp.launch.run.directory import Row, RunDir, read_json

IDLE_S = 2.0  # an answer without news
LOOK_S = 0.05
SLOWEST_S = 5.0  # longest wait between two attempts
STOP_S = 5.0


def actor_name(job: str) -> str:
    """The name under which the lighthouse's actor is found."""
    return f"{prefix(job)}-lighthouse"


class LighthouseActor:
    """The actor. run: the run directory."""

    def __init__(self, run: str) -> None:
        self._run = RunDir(Path(run))
        self._events: list[Row] = []
        self._fleet: LighthouseFleet | None = None
        self._starting = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, ...]:
        """Start the lighthouse, if it does not run; where it listens. Raises FtHsdpError."""
        async with self._starting:
            if self._fleet is None:
                config = load(self._run.config)
                named = self._run.seat(0) if config.lighthouse.etcd else self._run.lighthouse
                said = read_json(named)  # where it listened before this actor was started again
                if isinstance(said, dict) and said.get("url"):
                    network = config.network.model_copy(update={"port": urlsplit(said["url"]).port})
                    config = config.model_copy(update={"network": network})
                fleet = LighthouseFleet(self._run, config, self._events.append)
                await fleet.start()
                self._fleet = fleet
                self._keeping = asyncio.create_task(fleet.keep())
        return self._fleet.urls

    async def news(self) -> list[Row]:
        """The events since the last answer, at once or as soon as there is one."""
        until = time.monotonic() + IDLE_S
        while not self._events and time.monotonic() < until:  # noqa: ASYNC110 - they come into a plain list
            await asyncio.sleep(LOOK_S)
        events = list(self._events)
        del self._events[: len(events)]
        return events

    async def status(self) -> tuple[status.Status, list[str]]:
        """What the job does: for programs, and for people."""
        picture = await asyncio.to_thread(status.status, self._run)
        return picture, status.lines(self._run, picture)

    async def stop(self) -> None:
        """End the lighthouse."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._fleet is not None:
            await self._fleet.stop()


class RayLighthouse:
    """The lighthouse as the job's supervisor sees it. node: where its actor is; emit: takes each event."""

    def __init__(self, run: RunDir, node: str, emit: Callable[[Row], None]) -> None:
        self._run = run
        self._node = node
        self._emit = emit
        self._actor: Any = None
        self._urls: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where it listens; stays the same over restarts."""
        return self._urls

    async def start(self) -> None:
        """Start it. Raises ConfigError where the cluster has a job of this name, LighthouseFailed."""
        try:
            self._actor = self._make()
        except ValueError:
            allowed = "a name that no running job of this cluster has"
            raise ConfigError("job.name", self._run.name, allowed) from None
        try:
            self._urls = tuple(await self._actor.start.remote())
        except RayError as error:
            raise cause(error) from None

    async def keep(self) -> None:
        """Take its events, and see to it that it runs, until cancelled."""
        while True:
            try:
                for event in await self._actor.news.remote():
                    self._emit(event)
            except RayError as error:
                self._event("LighthouseExited", f"its actor is gone ({cause(error)}); Ray starts it again")
                await self._again()
                self._event("LighthouseRestarted", f"it listens at {self._urls[0]} again")

    async def stop(self) -> None:
        """End it and its actor."""
        if self._actor is None:
            return
        stopping = asyncio.ensure_future(self._actor.stop.remote())
        await asyncio.wait([stopping], timeout=STOP_S)
        if stopping.done():
            stopping.exception()  # it may be dead already
        else:
            stopping.cancel()
        ray.kill(self._actor)

    async def _again(self) -> None:
        """Start the lighthouse in the actor that Ray has started again, or in a new one."""
        wait_s = LOOK_S
        while True:
            try:
                if tuple(await self._actor.start.remote()) == self._urls:
                    return
            except RayError as error:
                if isinstance(cause(error), LighthouseFailed):
                    self._event("LighthouseFailed", str(cause(error)))
            await asyncio.sleep(wait_s)
            wait_s = min(SLOWEST_S, 2 * wait_s)
            with contextlib.suppress(ValueError):  # Ray has it still
                self._actor = self._make()

    def _make(self) -> Any:
        """Create the actor. Raises ValueError where there is one of its name."""
        options = {
            "name": actor_name(self._run.name),
            "num_cpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._node, soft=False),
            "enable_task_events": False,
            "max_concurrency": 100,
        }
        return ray.remote(LighthouseActor).options(**options).remote(str(self._run.path))

    def _event(self, name: str, reason: str) -> None:
        self._emit({"t": time.time(), "event": name, "source": "supervisor", "reason": reason})
