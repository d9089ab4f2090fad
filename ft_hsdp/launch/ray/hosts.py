"""The hosts of a job on a cluster: which places are reserved, and in each an actor that runs the host's agent.

What runs on which host is the lighthouse's decision. Here hosts are provided: one for each replica that is wanted,
and spare ones, or with `ray.strategy` other than STRICT_PACK one for each rank. If an actor or its node is lost,
another actor is started where Ray moves the bundle. A host that the lighthouse has cordoned gets a successor on
another node, and is kept until its replica trains again: what its state agents have may be needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from ft_hsdp import secret
from ft_hsdp.config import Config, dump, public
from ft_hsdp.config.entry import is_function, read
from ft_hsdp.core.restart import Cause, doubled
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.launch.backend.base import WorkerProcess
from ft_hsdp.launch.ray import placement
from ft_hsdp.launch.ray.actor import ActorLocation, ActorSetup, HeldNews, HostOrder, News
from ft_hsdp.launch.ray.cluster import Cluster, cause
from ft_hsdp.launch.ray.logs import LogReceiver
from ft_hsdp.launch.ray.placement import PlacementRequest
from ft_hsdp.launch.ray.seats import HostGroup, Pool, RayHost, RayProcess, Reservation, Seat, pools
from ft_hsdp.launch.run.directory import Row, RunDir, supervised, write_json_later
from ft_hsdp.protocol import SupervisorReply

POLL_S = 0.25  # between two looks at a placement group that has no place yet
AGAIN_S = 0.2  # before an actor that could not be reached is asked again
CLOSE_S = 5.0  # longest wait for actors to clean up
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0  # before an actor that could not be started is started again; it doubles
SPARES = 1000  # each host numbers its spares from a multiple of this on

Reserve = Callable[[PlacementRequest], Reservation]
OnLost = Callable[[str, str], Coroutine[Any, Any, None]]
"""Called with the name of a host that is lost, and why."""


class RayHosts:
    """Provides the hosts of a job. All methods belong to the driver's event loop."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        cluster: Cluster,
        setup: ActorSetup,
        emit: Callable[[Row], None],
        lost: OnLost,
        reserve: Reserve | None = None,
    ) -> None:
        """Begin without hosts.

        Args:
            cluster: Where this process is connected.
            lost: Called once for each host whose actor is dead.
            reserve: Asks for what a placement group has; None: Ray.
        """
        self.urls: tuple[str, ...] = ()  # of the lighthouses
        self.wrong = ""  # what a node says is wrong with the configuration
        self.ended = False  # no host is provided any more
        self.failed: list[BaseException] = []  # errors of tasks
        self.woken = asyncio.Event()  # a host has ended, or something is wrong
        self._config = config
        self._run = run
        self._cluster = cluster
        self._setup = setup
        self._emit = emit
        self._tell_lost = lost
        self._calls = ThreadPoolExecutor(1, "ray-calls")
        self._make: Reserve = reserve or (lambda request: Reservation(request, self._calls))
        self._receiver = LogReceiver(run.path, lambda lost: emit({**lost.event, "source": "supervisor"}))
        self._pools = pools(config)
        self._names: dict[str, int] = {}  # placement groups of each name
        self._seats = 0
        self._nodes: dict[str, tuple[str, str]] = {}  # by host: Ray's id of its node, and its name
        self._avoid: tuple[str, ...] = ()  # Ray's ids of nodes of cordoned hosts
        self._first: dict[str, int] = {}  # by incarnation: when it was first heard of
        # By replica: its newest incarnation, and the ranks of that, for `status`.
        self._rows: dict[int, tuple[str, dict[int, Row]]] = {}
        self._away: dict[int, int] = {}  # replica -> step before which it does not start again
        self._opened = False  # a host was started
        self._tasks: set[asyncio.Task[None]] = set()
        # What `close` gives back.
        self._alive: set[RayHost] = set()
        self._reserved: set[Reservation] = set()

    @property
    def _all(self) -> list[Seat]:
        return [seat for pool in self._pools for group in pool.groups for seat in group.seats]

    @property
    def hosts(self) -> list[RayHost]:
        """Return the hosts that there are."""
        return [host for seat in self._all for host in (*seat.former, seat.host) if host is not None]

    def provide(self, reply: SupervisorReply) -> None:
        """Provide the hosts that are wanted now, by the newest answer of the lighthouse."""
        self._avoid = tuple(self._nodes[name][0] for name in reply.cordoned if name in self._nodes)
        for seat in self._all:
            if seat.host is not None and seat.host.location.host in reply.cordoned:
                seat.host.left.set()
            for host in [*seat.former]:
                if host.over or (host.idle and all(map(self._trains, {held.replica for held in host.held}))):
                    seat.former.remove(host)
                    self._keep(self._retire(host))
        for pool in self._pools:
            replicas = [n for n in pool.only if n not in reply.drained and n not in reply.lost]
            owners = [*replicas, *[None] * pool.spare]
            for owner in owners:
                if owner is None and not self._placed(pool):
                    continue  # replicas come first
                count = sum(group.owner == owner for group in pool.groups)
                if len(pool.groups) < len(owners) and count < owners.count(owner):
                    self._add(pool, owner)
            if any(self.ranks(n)[1] for n in pool.only if n not in replicas):
                continue  # one that has not left yet will leave a host
            for group in sorted(
                (each for each in pool.groups if each.idle), key=lambda each: each.needed(replicas)
            ):
                if len(pool.groups) > len(owners):
                    pool.groups.remove(group)
                    self._keep(self._give_back(group))

    def newest(self, replica: int) -> tuple[str, int]:
        """Return the newest incarnation of a replica, and its size; ("", -1): it has none."""
        held = [each for host in self.hosts for each in host.held if each.replica == replica]
        newest = max(held, key=lambda each: self._first[each.incarnation], default=None)
        return (newest.incarnation, newest.size) if newest is not None else ("", -1)

    def ranks(self, replica: int) -> tuple[str, dict[int, WorkerProcess]]:
        """Return the newest incarnation of a replica, "" if it has none, and its processes by rank."""
        name, _ = self.newest(replica)
        found: dict[int, WorkerProcess] = {}
        for host in self.hosts:
            for held in host.held if name else ():
                if held.incarnation == name:
                    found |= {rank: self._process(host, pid) for rank, pid, runs in held.ranks if runs}
        return name, found

    def stay_away(self, replica: int, until_step: int) -> None:
        """Do not start a replica again before so many steps are committed."""
        self._away[replica] = until_step
        for host in self.hosts:
            host.actor.stay_away.remote(replica, until_step)

    def end(self) -> bool:
        """Provide no host any more; return whether the agents of all that there are have ended."""
        self.ended = True
        for seat in self._all:
            if seat.task is not None and seat.host is None:
                seat.task.cancel()
        return all(host.over for host in self.hosts)

    async def close(self) -> None:
        """End all actors and their ranks, and give all resources back."""
        tasks = [*self._tasks, *(seat.task for seat in self._all if seat.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(self._end, [*self._alive]))
        await asyncio.gather(*(each.remove() for each in self._reserved))
        if any(host.spares for host in self.hosts):
            write_json_later(self._run.spares / "spares.json", {"spares": []})
        self._calls.shutdown()

    def _placed(self, pool: Pool) -> bool:
        """Return whether all hosts of a pool that were asked for are there."""
        return all(seat.host is not None for group in pool.groups for seat in group.seats)

    def _trains(self, replica: int) -> bool:
        name, _ = self.newest(replica)
        return any(held.trains for host in self.hosts for held in host.held if held.incarnation == name)

    def _add(self, pool: Pool, owner: int | None) -> None:
        """Ask for hosts, and start an actor in each once it has its place."""
        group = HostGroup(owner, placement.request(self._config, owner, pool.zone))
        pool.groups.append(group)
        reservation = self._reserve(group.request)
        for place in range(group.request.size):
            self._seats += 1
            of = f"-p{place}" if group.request.size > 1 else ""
            name = f"s{self._seats}" if owner is None else f"r{owner}{of}"
            seat = Seat(name, self._seats, place, reservation)
            reservation.use(seat)
            group.seats.append(seat)
            seat.task = self._keep(self._provide(pool, group, seat))

    async def _give_back(self, group: HostGroup) -> None:
        """End the actors of a group, and give its resources back."""
        for seat in group.seats:
            assert seat.task is not None
            seat.task.cancel()
            await asyncio.gather(seat.task, return_exceptions=True)
            await asyncio.gather(*(self._retire(host) for host in (*seat.former, seat.host) if host is not None))
            await self._leave(seat.reservation, seat)

    def _reserve(self, request: PlacementRequest) -> Reservation:
        number = self._names[request.name] = self._names.get(request.name, 0) + 1
        name = request.name if number == 1 else f"{request.name}:{number}"
        made = self._make(replace(request, name=name, avoid=tuple(sorted({*request.avoid, *self._avoid} - {""}))))
        self._reserved.add(made)
        return made

    async def _leave(self, reservation: Reservation, user: object) -> None:
        if reservation.leave(user):
            await reservation.remove()
            self._reserved.discard(reservation)

    # Hosts.

    async def _provide(self, pool: Pool, group: HostGroup, seat: Seat) -> None:
        """Keep a host in a seat until the job ends."""
        failed, node, shun = 0, "", ""
        while not self.ended:
            try:
                node = await self._place(group, seat, shun)
                host = await self._open(pool, group, seat)
            except ConfigError as error:
                if not self._opened:  # else the fault is one node's
                    self.wrong = str(error)
                    self.woken.set()
                    return
                why = str(error)
            except (Retryable, OSError) as error:
                why = str(error)
            else:
                failed, shun = 0, ""
                await host.left.wait()
                seat.host = None
                if host.over:
                    await self._leave(host.reservation, host)
                else:  # it is cordoned
                    seat.former.append(host)
                    await self._move(group, seat)
                continue
            failed, shun = failed + 1, node if failed else ""
            self._prevented(group, why)
            await asyncio.sleep(doubled(PAUSE_S, failed, PAUSE_MAX_S))

    async def _place(self, group: HostGroup, seat: Seat, shun: str) -> str:
        """Wait until a seat has a place on a node that lives and is not to be avoided; return Ray's id of that.

        Args:
            shun: A node that counts only if no other has a place within `timeouts.place_s`; "": none.
        """
        if shun:
            await self._move(group, seat, shun)
        until, told = time.monotonic() + self._config.timeouts.place_s, False
        while not (node := await seat.reservation.node(seat.place)) or node in self._avoid:
            if node:  # Ray moves no bundle from a node that lives
                await self._move(group, seat, shun)
            elif shun and time.monotonic() > until:
                shun, until = "", until + self._config.timeouts.place_s
                await self._move(group, seat)
            elif not told and time.monotonic() > until:
                told = True
                why = placement.vacancy(seat.reservation.request, *self._cluster.free)
                cordoned = sorted({name for host, name in self._nodes.values() if host in self._avoid})
                self._prevented(group, why + (f"; cordoned: {', '.join(cordoned)}" if cordoned else ""))
            await asyncio.sleep(POLL_S)
        if told:
            self._prevented(group, "it has a place", over=True)
        return node

    async def _move(self, group: HostGroup, seat: Seat, shun: str = "") -> None:
        """Ask for another place of a seat, not on the node `shun`."""
        known = [each for each in group.seats if each is not seat and each.reservation.nodes]
        avoid = [shun]
        if group.request.strategy == "STRICT_SPREAD":
            avoid += [each.reservation.nodes[each.place] for each in known]
        old, seat.reservation = seat.reservation, self._reserve(replace(group.request, size=1, avoid=tuple(avoid)))
        seat.place = 0
        seat.reservation.use(seat)
        await self._leave(old, seat)

    def _prevented(self, group: HostGroup, why: str, *, over: bool = False) -> None:
        if group.owner is not None:
            facts = {"replica": group.owner, "incarnation": "", "cause": Cause.SHORTAGE, "over": over}
            self._emit(supervised("StartPrevented", why, **facts))

    async def _open(self, pool: Pool, group: HostGroup, seat: Seat) -> RayHost:
        """Start an actor in a seat, and the agent in it. Raises ConfigError, or Retryable if it is too slow."""
        config, run = self._config, self._run
        seat.lives += 1
        name = seat.name if seat.lives == 1 else f"{seat.name}-{seat.lives}"
        several = len(group.seats) > 1
        order = HostOrder(
            name,
            None if group.owner is None else (group.owner, group.seats.index(seat)),
            pool.only,
            None if several else seat.number * SPARES,
            dump(public(config)),
            secret.current(run.token),
            secret.current(run.checkpoint_key),
            self.urls,
            str(run.path),
            self._cluster.address,
            b"" if config.entry is None or is_function(config.entry) else read(config.entry),
        )
        actor, waits = await seat.reservation.actor(seat.place, self._setup), config.timeouts
        patience_s = waits.reach_s + waits.boot_s + waits.spawn_s
        if config.hosts.check:
            patience_s += config.hosts.check + waits.boot_s
        try:
            async with asyncio.timeout(patience_s):
                location: ActorLocation = await actor.open.remote(order)
        except BaseException as error:
            seat.reservation.kill(actor)
            if isinstance(error, TimeoutError):
                why = f"the actor of {seat.reservation.request.name} does not start within {patience_s:g} s"
                raise Retryable(why) from None
            if isinstance(error, RayError):
                raise cause(error) from None
            raise
        self._opened = True
        seat.host = host = RayHost(actor, location, seat.reservation)
        host.reservation.use(host)
        self._alive.add(host)
        self._nodes[location.host] = location.node, location.host.removesuffix(f"-{name}")
        for replica, step in self._away.items():
            actor.stay_away.remote(replica, step)
        if self.ended:
            actor.stop.remote(int(signal.SIGTERM))
        host.polling = self._keep(self._poll(host))
        return host

    async def _poll(self, host: RayHost) -> None:
        """Take an actor's news until its agent has ended, or Ray says that it is dead."""
        arrived = 0
        while True:
            try:
                news: News = await host.actor.news.remote(arrived)
            except ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)
                continue
            except RayError as error:
                await self._lost(host, str(cause(error)))
                return
            if news.number <= arrived:
                continue
            arrived = news.number
            try:
                self._receiver.add(news.pieces)
            except ValueError as error:
                await self._lost(host, f"what it wrote cannot be kept: {error}")
                return
            for event in news.events:
                self._emit(event)
            self._heard(host, news.held, news.spares)
            if news.refused:
                await self._lost(host, news.refused)
            if news.over:
                host.over = True
                self.woken.set()
                return

    def _heard(self, host: RayHost, held: tuple[HeldNews, ...], spares: list[Row]) -> None:
        """Note what a host has, and write that down for `status`."""
        if spares != host.spares:
            host.spares = spares
            shown = [row for each in self.hosts for row in each.spares]
            write_json_later(self._run.spares / "spares.json", {"spares": shown})
        host.held, at = held, {"host": host.location.host, "machine": host.location.machine}
        for each in held:
            number = self._first.setdefault(each.incarnation, len(self._first))
            name, rows = self._rows.get(each.replica, ("", {}))
            if number < self._first.get(name, -1):
                continue
            before = dict(rows) if name == each.incarnation else {}
            states = {rank: (pid, "running" if runs else "exited") for rank, pid, runs in each.ranks}
            new = {n: {"rank": n, "pid": pid, **at, "state": state} for n, (pid, state) in states.items()}
            now = dict(sorted({**before, **new}.items()))
            self._rows[each.replica] = each.incarnation, now
            if now != before and len(now) == each.size:
                document = {"replica": each.replica, "incarnation": each.incarnation, "restarts": each.restarts}
                write_json_later(self._run.processes(each.replica), {**document, "ranks": list(now.values())})

    async def _lost(self, host: RayHost, why: str) -> None:
        """Note that an actor is dead, and all that it started. The last lines of its ranks' logs are lost."""
        dead = []
        for held in host.held:
            for rank, _, runs in held.ranks:
                if runs:
                    about = {"replica": held.replica, "rank": rank, "incarnation": held.incarnation}
                    self._emit(supervised("LogCut", f"on {host.location.host}: {why}", **about))
            dead.append(replace(held, ranks=tuple((rank, pid, False) for rank, pid, _ in held.ranks)))
        self._heard(host, tuple(dead), [])
        host.over = True
        host.reservation.kill(host.actor)
        self._alive.discard(host)
        host.left.set()
        self.woken.set()
        await self._tell_lost(host.location.host, why)

    async def _retire(self, host: RayHost) -> None:
        """End an actor whose host is not needed any more, once its agent has said goodbye."""
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(CLOSE_S):
                await host.actor.stop.remote(int(signal.SIGTERM))
                while not host.over:  # noqa: ASYNC110 - what is awaited is in another process
                    await asyncio.sleep(POLL_S)
        if host.polling is not None:
            host.polling.cancel()
        await self._end(host)
        await self._leave(host.reservation, host)

    async def _end(self, host: RayHost) -> None:
        closing = asyncio.ensure_future(host.actor.close.remote())
        await asyncio.wait([closing], timeout=CLOSE_S)
        if closing.done():
            closing.exception()  # read it, so that asyncio does not log it: a dead actor is closed as well
        else:
            closing.cancel()
        host.reservation.kill(host.actor)
        self._alive.discard(host)

    def _process(self, host: RayHost, pid: int) -> RayProcess:
        return RayProcess(pid, host.location.machine, host.location.host, host.actor)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.failed.append(error)
                self.woken.set()

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(over)
        return task
