"""The actor of one rank: it runs one rank at a time, on the node of its bundle, as a child of its own.

An actor belongs to the job, not to a replica: it is told which rank it starts with each start, or, for a spare,
when the spare is needed. The rank is forked from a preloaded process, so that a restart on the same node is as
fast as on one machine; both die with the actor. What the rank writes lies in a private folder of the node, and
the driver fetches it (`logs`).
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

import ray
import ray.util

from ft_hsdp import secret
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend.base import ReplicaSpec, call, spare_log
from ft_hsdp.launch.backend.forkserver import SPAWN_S, ForkServer
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.launch.ray.logs import NODES, LogPiece, LogSender
from ft_hsdp.launch.run.directory import RunDir, alive, identity, read_json, write_json

LOOK_S = 0.25  # between two looks at the files; an exit is told at once
IDLE_S = 2.0  # an answer without news
OWNER = "owner.json"
CHECKPOINTS = "checkpoints"  # where they are without checkpoint.dir


@dataclass(frozen=True, slots=True)
class Home:
    """How an actor sets itself up. job: its name; folder: ray.folder; cwd: of the driver, "" where the actor has
    one of its own; entry, preload, boot_s, spawn_s: see `ForkServer`.
    """

    job: str
    folder: str
    cwd: str
    entry: str
    preload: tuple[str, ...]
    boot_s: float
    spawn_s: float = SPAWN_S


@dataclass(frozen=True, slots=True)
class ActorPlace:
    """Where an actor found itself."""

    host: str
    address: str
    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartOrder:
    """What a rank is started with. Its secrets stand in private files on the node.

    called: whose rank it is; None: the spare's with this number; run: the run directory, on the driver's node.
    """

    rank: int
    called: ReplicaSpec | None
    spare: int
    env: dict[str, str]
    config: str
    token: str
    checkpoint_key: str
    urls: tuple[str, ...]
    run: str


@dataclass(frozen=True, slots=True)
class News:
    """What happened since the answer before: new lines, and then exits (pid, code), which those lines precede.

    warm: pids of ranks that wait to be called.
    """

    number: int
    pieces: list[LogPiece] = field(default_factory=list)
    warm: list[int] = field(default_factory=list)
    exits: list[tuple[int, int]] = field(default_factory=list)


class RankActor:
    """The actor; an asyncio one, so that its methods run beside each other."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._run: RunDir | None = None
        self._warm: list[int] = []
        self._exits: list[tuple[int, int]] = []
        self._news: News | None = None  # not known to have arrived
        self._number = 0
        self._woken = asyncio.Event()

    async def open(self) -> ActorPlace:
        """Make the folder and load what ranks need. Raises ConfigError, Retryable."""
        home = self._home
        enter(home.cwd)
        self._run = run = RunDir(make_folder(Path(home.folder), home.job))
        self._forks = ForkServer(
            run.path, entry=home.entry, preload=home.preload, boot_s=home.boot_s, spawn_s=home.spawn_s
        )
        log = f"{NODES}/{socket.gethostname()}-{os.getpid()}.log"
        self._outbox = LogSender(run.path, {run.path / "forkserver.log": log})
        await self._forks.start()
        context = ray.get_runtime_context()
        gpus = tuple(context.get_accelerator_ids().get("GPU", ()))
        return ActorPlace(socket.gethostname(), ray.util.get_node_ip_address(), context.get_node_id(), gpus)

    async def port(self, host: str) -> int:
        """A port that is free on this node."""
        return free_port(host)

    async def start(self, start: StartOrder) -> int:
        """Start the rank; its pid. Raises Retryable."""
        run, spec = self._run, start.called
        assert run is not None, "open() comes first"
        run.config.write_text(start.config)
        secret.write_private(run.token, start.token)
        secret.write_private(run.checkpoint_key, start.checkpoint_key)
        write_json(run.lighthouse, {"pid": 0, "url": start.urls[0], "urls": list(start.urls)})
        share(run, Path(start.run))
        spared = spare_log(run.spares, start.spare, start.rank)
        log = spared if spec is None else run.rank_log(spec.replica, start.rank)
        return await self._forks.spawn(
            env=start.env,
            config=run.config,
            log=log,
            on_exit=self._exited,
            call=None if spec is None else call(spec, start.rank, run),
            on_warm=self._waits,
        )

    async def call(self, pid: int, spec: ReplicaSpec, rank: int) -> None:
        """Tell a spare's rank whose it is."""
        assert self._run is not None, "open() comes first"
        self._forks.call(pid, call(spec, rank, self._run))

    async def signal(self, pid: int, number: int) -> None:
        """Signal a rank, if it still runs."""
        self._forks.signal(pid, number)

    async def news(self, arrived: int) -> News:
        """What is new, at once or as soon as there is something; the same until it is known to have arrived."""
        if self._news is not None and self._news.number <= arrived:
            self._news = None
        loop = asyncio.get_running_loop()
        until = loop.time() + IDLE_S
        while self._news is None and loop.time() < until:
            self._woken.clear()
            ended = list(self._exits)
            pieces, whole = self._outbox.take(flush=bool(ended))
            if pieces or self._warm or (ended and whole):
                exits = ended if whole else []
                del self._exits[: len(exits)]
                self._number += 1
                warm, self._warm = self._warm, []
                self._news = News(self._number, pieces, warm, exits)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._woken.wait()
        return self._news or News(arrived)

    async def close(self) -> None:
        """End the rank, and remove what it wrote."""
        if self._run is not None:
            await self._forks.close()
            await asyncio.to_thread(shutil.rmtree, self._run.path, ignore_errors=True)

    def _waits(self, pid: int) -> None:
        self._warm.append(pid)
        self._woken.set()

    def _exited(self, pid: int, code: int) -> None:
        self._exits.append((pid, code))
        self._woken.set()


def enter(cwd: str) -> None:
    """Go to the driver's folder, if it is here: relative paths of the configuration mean the same there."""
    if cwd and os.path.isdir(cwd):
        os.chdir(cwd)


def share(run: RunDir, driver: Path) -> None:
    """Have checkpoints go to the driver's run directory, where this node has it; see `checkpoint.dir`."""
    ours, theirs = run.path / CHECKPOINTS, driver / CHECKPOINTS
    if driver.is_dir() and not ours.is_symlink():
        theirs.mkdir(exist_ok=True)
        ours.symlink_to(theirs)


def make_folder(parent: Path, name: str) -> Path:
    """A new private folder in `parent`; those whose actor died on this host are removed. Raises ConfigError.

    Who owns the parent could put another folder in the place of the new one: it has to be ours or root's, and who
    else may write there must not be able to rename what is not theirs (the sticky bit). It may be shared with
    other hosts, whose processes cannot be seen from here.
    """
    host = socket.gethostname()
    parent = Path(str(parent).replace("{uid}", str(os.getuid())))
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = parent.stat()
        others_write = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (os.getuid(), 0) or others_write:
            allowed = f"a folder of this user in which nobody else can rename files ({host}: uid {found.st_uid}, "
            raise ConfigError("ray.folder", str(parent), f"{allowed}mode {stat.S_IMODE(found.st_mode):o})")
        for owner in parent.glob(f"*/{OWNER}"):
            with contextlib.suppress(FileNotFoundError):  # another actor of this host sweeps, too
                named = read_json(owner) or {}
                if owner.stat().st_uid == os.getuid() and named.get("host") == host and not alive(named):
                    shutil.rmtree(owner.parent, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
        write_json(made / OWNER, {**identity(), "host": host})
    except OSError as error:
        allowed = f"a folder that can be written on {host} ({error.strerror})"
        raise ConfigError("ray.folder", str(parent), allowed) from None
    return made
