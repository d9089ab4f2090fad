"""The actor of one rank: it runs one rank at a time, as a child process, on the node of its bundle.

An actor belongs to the job, not to a replica. Each start order says which replica's rank it starts; the rank of a
spare learns its replica later, when the spare is needed. The rank is forked from a preloaded process, so that a
restart on the same node is as fast as on one machine. The rank and the preloaded process die with the actor. The
rank writes to a private folder of the node, and the driver fetches its files (`logs`).
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

import ray
import ray.util

from ft_hsdp import secret
from ft_hsdp.config import RayConfig, dump, load
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend.base import ReplicaSpec, assignment, spare_log
from ft_hsdp.launch.backend.forkserver import SPAWN_S, ForkServer
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.launch.ray.logs import NODES, LogPiece, LogSender
from ft_hsdp.launch.ray.placement import host_environment
from ft_hsdp.launch.run.directory import RunDir, alive, identity, read_json, write_json
from ft_hsdp.train.identity import HOST_VARIABLE

POLL_S = 0.25  # between two looks at the files; an exit is reported at once
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
class ActorLocation:
    """Where an actor runs, as it found out itself."""

    machine: str  # its name
    host: str  # what is lost with the node; its name
    address: str  # of the node, as Ray knows it
    node: str  # Ray's id of the node
    gpus: tuple[str, ...]  # ids of the GPUs that Ray gave to the actor


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What a rank is started with. The actor writes the secrets to private files on its node."""

    rank: int
    called: ReplicaSpec | None  # the incarnation; None: a spare
    spare: int  # number of the spare
    env: dict[str, str]
    config: str  # YAML
    token: str
    checkpoint_key: str
    urls: tuple[str, ...]  # of the lighthouse
    run: str  # the run directory, on the driver's node
    hosts: tuple[str, ...]  # on which the replica was placed, by rank
    script: bytes = b""  # what `entry` names, if that is a script


@dataclass(frozen=True, slots=True)
class News:
    """What happened on an actor since its last answer."""

    number: int  # counts answers with news, so that the caller can say which has arrived
    pieces: list[LogPiece] = field(default_factory=list)
    warm: list[int] = field(default_factory=list)  # pids of ranks that are ready and wait for their replica
    exits: list[tuple[int, int]] = field(default_factory=list)  # (pid, code); all lines of these ranks were sent


class RankActor:
    """Runs one rank on a node. An asyncio actor of Ray: its methods run concurrently on one event loop."""

    def __init__(self, setup: ActorSetup) -> None:
        self._setup = setup
        self._run: RunDir | None = None
        self._host: dict[str, str] = {}  # variables that tell a rank its host
        self._warm: list[int] = []
        self._exits: list[tuple[int, int]] = []
        self._news: News | None = None  # the last answer, until the driver confirms that it arrived
        self._number = 0
        self._woken = asyncio.Event()

    async def open(self) -> ActorLocation:
        """Make the actor's folder and start the process from which ranks are forked.

        Returns:
            Where the actor runs.

        Raises:
            ConfigError: This node cannot use `ray.folder`.
            Retryable: The preloaded process does not start.
        """
        setup = self._setup
        change_folder(setup.cwd)
        self._run = run = RunDir(make_folder(Path(setup.ray.folder), setup.job))
        self._forks = ForkServer(
            run.path, entry=setup.entry, preload=setup.preload, boot_s=setup.boot_s, spawn_s=setup.spawn_s
        )
        log = f"{NODES}/{socket.gethostname()}-{os.getpid()}.log"
        self._sender = LogSender(run.path, {run.path / "forkserver.log": log})
        await self._forks.start()
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        machine, node = socket.gethostname(), context.get_node_id()
        labels = cast(dict[str, str], context.get_node_labels())  # not lists, as its type says
        self._host = host_environment(machine, node, labels, setup.ray, os.environ)
        address = ray.util.get_node_ip_address()
        return ActorLocation(machine, self._host[HOST_VARIABLE], address, node, gpus)

    async def port(self, host: str) -> int:
        return free_port(host)

    async def start(self, start: StartOrder) -> int:
        """Start the rank.

        Returns:
            Its pid.

        Raises:
            Retryable: The rank cannot be forked.
        """
        run, spec = self._run, start.called
        assert run is not None, "open() comes first"
        run.config.write_text(start.config)
        place_script(run, start.script)
        secret.write_private(run.token, start.token)
        secret.write_private(run.checkpoint_key, start.checkpoint_key)
        write_json(run.lighthouse, {"pid": 0, "url": start.urls[0], "urls": list(start.urls)})
        link_checkpoints(run, Path(start.run))
        spared = spare_log(run.spares, start.spare, start.rank)
        log = spared if spec is None else run.rank_log(spec.replica, start.rank)
        return await self._forks.spawn(
            env={**start.env, **self._host},
            config=run.config,
            log=log,
            on_exit=self._exited,
            assignment=None if spec is None else assignment(spec, start.rank, run, start.hosts),
            on_warm=self._rank_warm,
        )

    async def call(self, pid: int, spec: ReplicaSpec, rank: int, hosts: tuple[str, ...]) -> None:
        """Tell a spare's rank which incarnation it belongs to, and the host of each rank."""
        assert self._run is not None, "open() comes first"
        self._forks.assign(pid, assignment(spec, rank, self._run, hosts))

    async def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank if it still runs."""
        self._forks.signal(pid, number)

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
            ended = list(self._exits)
            pieces, whole = self._sender.take(flush=bool(ended))
            if pieces or self._warm or (ended and whole):
                exits = ended if whole else []
                del self._exits[: len(exits)]
                self._number += 1
                warm, self._warm = self._warm, []
                self._news = News(self._number, pieces, warm, exits)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()
        return self._news or News(arrived)

    async def close(self) -> None:
        """End the rank and remove the actor's folder."""
        if self._run is not None:
            await self._forks.close()
            await asyncio.to_thread(shutil.rmtree, self._run.path, ignore_errors=True)

    def _rank_warm(self, pid: int) -> None:
        self._warm.append(pid)
        self._woken.set()

    def _exited(self, pid: int, code: int) -> None:
        self._exits.append((pid, code))
        self._woken.set()


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
    run.config.write_text(dump(config.model_copy(update={"entry": str(file)})))


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
            with contextlib.suppress(
                FileNotFoundError
            ):  # another actor of this host may remove it at the same time
                named = read_json(owner) or {}
                if owner.stat().st_uid == os.getuid() and named.get("host") == host and not alive(named):
                    shutil.rmtree(owner.parent, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
        write_json(made / OWNER, {**identity(), "host": host})
    except OSError as error:
        allowed = f"a folder that can be written on {host} ({error.strerror})"
        raise ConfigError("ray.folder", str(parent), allowed) from None
    return made
