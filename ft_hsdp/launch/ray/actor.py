"""The actor of a host: it runs the host's agent on the node of its bundle.

The agent (`launch.agent`) talks to the lighthouse itself, and starts ranks from a preloaded process, so that a
restart on the same node is as fast as on one machine. All that it starts dies with the actor. Ranks write to a
private folder of the node. The driver asks for the actor's news: what was added to those files (`logs`), events,
and which ranks run. What the actor runs comes from the driver alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import ray
import ray.util

from ft_hsdp import secret, tls
from ft_hsdp.address import loopback
from ft_hsdp.config import Config, RayConfig, dump, load
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.errors import ConfigError, FtHsdpError, LighthouseUnreachable, Retryable
from ft_hsdp.jsonl import open_to_append, replace_json
from ft_hsdp.launch import burn_in
from ft_hsdp.launch.agent import HostAgent, agent_path
from ft_hsdp.launch.backend.forkserver import SPAWN_S, ForkServer
from ft_hsdp.launch.backend.ranks import LocalRanks
from ft_hsdp.launch.lighthouse_process import reach
from ft_hsdp.launch.progress import Progress
from ft_hsdp.launch.ray.logs import NODES, LogPiece, LogSender
from ft_hsdp.launch.ray.placement import host_environment
from ft_hsdp.launch.run.directory import Row, RunDir, alive, read_json, supervised
from ft_hsdp.launch.standalone import wait_for_lighthouse
from ft_hsdp.lifetime import identity
from ft_hsdp.protocol import SupervisorReply

POLL_S = 0.25  # between two looks at the files; events are reported at once
IDLE_S = 2.0  # `news` answers after this time at the latest
OWNER = "owner.json"
CHECKPOINTS = "checkpoints"  # where they are without checkpoint.dir


@dataclass(frozen=True, slots=True)
class ActorSetup:
    job: str  # name of the job
    ray: RayConfig
    cwd: str  # working directory of the driver; "" if Ray gives the actor a copy of one
    # As in `ForkServer`:
    entry: str
    preload: tuple[str, ...]
    boot_s: float
    spawn_s: float = SPAWN_S


@dataclass(frozen=True, slots=True)
class HostOrder:
    """What the agent of a host is started with. The actor writes the secrets to private files on its node."""

    name: str  # of the host, after that of the node
    home: tuple[int, int] | None  # as `HostAgent` takes it
    only: tuple[int, ...]  # the same
    spare: int | None  # as `LocalRanks` takes it: `lone`
    config: str  # YAML
    token: str
    checkpoint_key: str
    urls: tuple[str, ...]  # of the lighthouse
    run: str  # the run directory, on the driver's node
    address: str  # of that node
    script: bytes = b""  # what `entry` names, if that is a script


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """Where an actor runs, as it found out itself."""

    machine: str  # its name
    host: str  # the name of the host, as its agent reports it
    node: str  # Ray's id of the node


@dataclass(frozen=True, slots=True)
class HeldNews:
    """What a host has of an incarnation that is assigned to it."""

    incarnation: str
    replica: int
    restarts: int
    size: int  # its ranks, on all hosts
    trains: bool  # it has contributed to a step
    ranks: tuple[tuple[int, int, bool], ...]  # on this host: rank, pid, and whether it runs


@dataclass(frozen=True, slots=True)
class News:
    """What happened on an actor since its last answer."""

    number: int  # counts answers with news, so that the caller can say which has arrived
    pieces: list[LogPiece] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    held: tuple[HeldNews, ...] = ()
    spares: list[Row] = field(default_factory=list)  # as `SparePool.shown`
    over: bool = False  # the agent has ended, and all that its ranks wrote was sent
    refused: str = ""  # why the lighthouse refuses the host


class HostActor:
    """Runs the agent of a host. An asyncio actor of Ray: its methods run concurrently on one event loop."""

    def __init__(self, setup: ActorSetup) -> None:
        self._setup = setup
        self._progress = Progress()
        self._stopped = False
        self._stalled_s = 0.0
        self._open = contextlib.AsyncExitStack()  # what `close` ends
        self._events: list[Row] = []
        self._sent: tuple[tuple[HeldNews, ...], list[Row]] = (), []
        self._news: News | None = None  # the last answer, until the driver confirms that it arrived
        self._number = 0
        self._woken = asyncio.Event()

    async def open(self, order: HostOrder) -> ActorLocation:
        """Make the actor's folder, try the node, start the fork server, then the agent; return where it runs.

        Raises:
            ConfigError: This node cannot use `ray.folder`, or the configuration.
            Retryable: No lighthouse answers here within `timeouts.reach_s`, `hosts.check` has found something, or
                the preloaded process does not start.
        """
        setup, address = self._setup, ray.util.get_node_ip_address()
        change_folder(setup.cwd)
        alone = loopback(urlsplit(order.urls[0]).hostname or "")
        if alone and address != order.address:
            why = f"{address} cannot reach {order.urls[0]}; give network.host an address that the cluster reaches"
            raise Retryable(why)
        run = RunDir(make_folder(Path(setup.ray.folder), setup.job))
        self._open.push_async_callback(asyncio.to_thread, shutil.rmtree, run.path, ignore_errors=True)
        config = write_files(run, order, "127.0.0.1" if alone else address, setup)
        context = ray.get_runtime_context()
        machine, node = socket.gethostname(), context.get_node_id()
        labels = cast(dict[str, str], context.get_node_labels())  # not lists, as its type says
        os.environ.update(host_environment(machine, node, labels, setup.ray, os.environ))  # for the ranks, too
        try:
            trusted, reach_s = tls.trusted(config.network), config.timeouts.reach_s
            await asyncio.to_thread(wait_for_lighthouse, run, trusted, reach_s)
        except LighthouseUnreachable as error:
            raise Retryable(f"{machine}: {error}") from None
        if config.hosts.check and (why := await burn_in.failure(config, run.config, run.path)):
            raise Retryable(f"{machine}: {why}")
        path = f"{agent_path(config, os.environ)}-{order.name}"
        self._forks = ForkServer(
            run.path,
            entry=setup.entry,
            preload=setup.preload,
            boot_s=setup.boot_s,
            spawn_s=setup.spawn_s,
            lost=lambda pid, why: self._emit(
                supervised("ForkServerLost", f"{why}: another one is started", pid=pid)
            ),
        )
        log = f"{NODES}/{socket.gethostname()}-{os.getpid()}.log"
        self._log = run.path / "agent.log"
        self._sender = LogSender(run.path, dict.fromkeys((run.path / "forkserver.log", self._log), log))
        await self._forks.start()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ())) if config.train.device != "cpu" else ()
        self._ranks = LocalRanks(
            config, run, self._forks, gpus=gpus, whole=False, lone=order.spare, emit=self._emit
        )
        self._open.push_async_callback(self._ranks.close)
        client = LighthouseClient(*reach(config, run, order.urls, config.timeouts.evict_s / 3))
        self._open.push_async_callback(client.close)
        self._stalled_s = config.timeouts.stalled_s
        self._agent = HostAgent(
            config,
            run,
            self._ranks,
            client,
            path,
            home=order.home,
            only=order.only,
            emit=self._emit,
            say=self._say,
            news=self._take,
            may_start=self._may_start,
        )
        self._running = asyncio.create_task(self._agent.run())
        self._running.add_done_callback(lambda _: self._woken.set())
        self._open.push_async_callback(self._end_agent)
        return ActorLocation(machine, self._agent.name, node)

    async def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank if it still runs."""
        self._forks.signal(pid, number)

    async def stay_away(self, replica: int, until_step: int) -> None:
        """Do not start a replica again before so many steps are committed."""
        self._progress.stay_away(replica, until_step)

    async def stop(self, number: int) -> None:
        """Have all ranks leave the job because of a signal, as `HostAgent.stop`."""
        self._stopped = True
        self._progress.wake()
        self._agent.stop(number)

    async def news(self, arrived: int) -> News:
        """Return what is new; wait up to `IDLE_S` for it.

        Args:
            arrived: Number of the newest answer that the caller has. A newer one is sent again.

        Returns:
            The news; an empty answer with the number `arrived` if there is none.
        """
        if self._news is not None and self._news.number <= arrived:
            self._news = None
        loop = asyncio.get_running_loop()
        until = loop.time() + IDLE_S
        while self._news is None and loop.time() < until:
            self._woken.clear()
            ended = self._running.done()
            pieces, whole = self._sender.take(flush=ended)
            held, spares = tuple(self._held()), self._ranks.pool.shown
            if pieces or self._events or ended or (held, spares) != self._sent:
                self._number += 1
                events, self._events, self._sent = self._events, [], (held, spares)
                error = self._running.exception() if ended and not self._running.cancelled() else None
                if error is not None and not isinstance(error, FtHsdpError):
                    raise error
                why = str(error or "")
                self._news = News(self._number, pieces, events, held, spares, ended and whole, why)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()
        return self._news or News(arrived)

    async def close(self) -> None:
        """End all ranks and remove the actor's folder."""
        await self._open.aclose()

    async def _end_agent(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def _held(self) -> list[HeldNews]:
        return [
            HeldNews(
                held.name,
                held.replica,
                held.spec.restarts,
                held.spec.size,
                held.assigned.trains,
                tuple((rank.rank, rank.pid, rank.state == "running") for rank in held.ranks.values()),
            )
            for held in self._agent.held.values()
            if held.wanted or not held.over
        ]

    def _emit(self, event: Row) -> None:
        self._events.append(event)
        self._woken.set()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError), open_to_append(self._log) as log:
            log.write(f"{line}\n".encode())

    def _take(self, reply: SupervisorReply) -> None:
        self._progress.saw(reply.step, reply.finished, reply.halted)

    async def _may_start(self, replica: int) -> None:
        await self._progress.may_start(replica, self._stalled_s, lambda: self._stopped)


def write_files(run: RunDir, order: HostOrder, address: str, setup: ActorSetup) -> Config:
    """Write what the ranks of a host need into the actor's folder; return their configuration.

    It has the address of the node, and its folder for prepared data.
    """
    run.config.write_text(order.config, encoding="utf-8")
    config = load(run.config)
    changes = {
        "job": config.job.model_copy(update={"runs_dir": setup.ray.folder}),
        "network": config.network.model_copy(update={"host": address}),
    }
    run.config.write_text(dump(config.model_copy(update=changes)), encoding="utf-8")
    place_script(run, order.script)
    secret.write_private(run.token, order.token)
    secret.write_private(run.checkpoint_key, order.checkpoint_key)
    replace_json(run.lighthouse, {"pid": 0, "url": order.urls[0], "urls": list(order.urls)})
    link_checkpoints(run, Path(order.run))
    return load(run.config)


def change_folder(cwd: str) -> None:
    """Change to the driver's folder if this node has it, so that relative paths mean the same."""
    if cwd and os.path.isdir(cwd):
        os.chdir(cwd)


def place_script(run: RunDir, script: bytes) -> None:
    """Write the script that `entry` names into an actor's folder, and name that, if this node has no such file.

    A script that is here may import the modules beside it. If it is another one, its digest shows that.
    """
    config = load(run.config) if script else None
    if config is None or config.entry is None or Path(config.entry).is_file():
        return
    file = run.path / "entry" / Path(config.entry).name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(script)
    run.config.write_text(dump(config.model_copy(update={"entry": str(file)})), encoding="utf-8")


def link_checkpoints(run: RunDir, driver: Path) -> None:
    """Link the checkpoint folder to the driver's run directory, if this node has that (`checkpoint.dir`)."""
    ours, theirs = run.path / CHECKPOINTS, driver / CHECKPOINTS
    if driver.is_dir() and not ours.is_symlink():
        theirs.mkdir(exist_ok=True)
        ours.symlink_to(theirs)


def make_folder(parent: Path, name: str) -> Path:
    """Make a private folder in `parent`, and remove the folders of actors that died on this host.

    The owner of the parent could replace the new folder, so the owner must be this user or root. If other users
    may write to the parent, it must have the sticky bit, so that they cannot rename the folders of others. Other
    hosts may share the parent; folders of their actors stay, because their processes cannot be seen from here.

    Args:
        parent: `ray.folder`; `{uid}` in it stands for this user's id.
        name: The new folder's name begins with it.

    Raises:
        ConfigError: The parent cannot be written, or is not safe.
    """
    host = socket.gethostname()
    parent = Path(str(parent).replace("{uid}", str(os.getuid())))
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.stat()
        others_write = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) or others_write:
            allowed = (
                f"a folder of this user in which no other user can rename files ({host}: uid {found.st_uid}, "
            )
            raise ConfigError("ray.folder", str(parent), f"{allowed}mode {stat.S_IMODE(found.st_mode):o})")
        for owner in parent.glob(f"*/{OWNER}"):
            with contextlib.suppress(FileNotFoundError):  # another actor of this host may remove it meanwhile
                named = read_json(owner) or {}
                if owner.stat().st_uid == os.getuid() and named.get("host") == host and not alive(named):
                    shutil.rmtree(owner.parent, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
        replace_json(made / OWNER, {**identity(), "host": host})
    except OSError as error:
        allowed = f"a folder that can be written on {host} ({error.strerror})"
        raise ConfigError("ray.folder", str(parent), allowed) from None
    return made
