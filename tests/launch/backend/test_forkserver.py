import asyncio
import errno
import gc
import json
import os
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator

import psutil
import pytest

from ft_hsdp.errors import EXIT_CONFIG, EXIT_RETRYABLE, Retryable
from ft_hsdp.launch.backend import zygote
from ft_hsdp.launch.backend.forkserver import ForkServer
from ft_hsdp.launch.backend.processes import environment
from ft_hsdp.launch.run.directory import RunDir, alive
from ft_hsdp.lifetime import MARK_VARIABLE, UNMARKED
from tests.support.descriptors import raised
from tests.support.launch.launch_helpers import Plan
from tests.support.waiting import async_until

STANDIN = "tests.support.launch.standin:main"


class Ranks:
    """Spawns stand-ins and keeps their exits."""

    def __init__(self, run: RunDir, spawn_s: float = 10.0) -> None:
        self.run = run
        self.lost: list[tuple[int, str]] = []
        self.server = ForkServer(
            run.path, entry=STANDIN, preload=(), spawn_s=spawn_s, lost=lambda *what: self.lost.append(what)
        )
        self.exits: dict[int, int] = {}

    @property
    def forker(self) -> int:
        """The pid of the fork server."""
        assert self.server.pid is not None
        return self.server.pid

    async def stopped(self, pid: int) -> None:
        """Stop a rank."""
        self.server.signal(pid, signal.SIGSTOP)
        await async_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stop")

    async def killed(self, pid: int) -> None:
        """Kill a rank, the first one that ends."""
        assert not self.exits
        self.server.signal(pid, signal.SIGKILL)
        await async_until(lambda: self.exits, "the exit")
        assert self.exits == {pid: -signal.SIGKILL}

    async def spawn(self, rank: int = 0, restart: int = 0) -> int:
        return await self.server.spawn(
            env={"RANK": str(rank)},
            config=self.run.config,
            log=self.run.rank_log(0, rank),
            assignment=self.assignment(rank, restart),
            on_exit=lambda pid, code: self.exits.update({pid: code}),
        )

    async def spawn_uncalled(self) -> int:
        log = self.run.path / "uncalled.log"
        warm: list[int] = []
        pid = await self.server.spawn(
            env={"RANK": "2"},
            config=self.run.config,
            log=log,
            on_exit=lambda pid, code: self.exits.update({pid: code}),
            on_warm=warm.append,
        )
        await async_until(lambda: warm == [pid], "it to be warm")
        return pid

    def assignment(self, rank: int, restart: int) -> dict[str, object]:
        return {"replica": 0, "run_id": "a", "restarts": restart, "log": str(self.run.rank_log(0, rank))}

    async def spawn_waiting(self, rank: int = 0, restart: int = 0) -> int:
        pid = await self.spawn(rank, restart)
        await async_until((self.run.path / f"waiting-0-{restart}-{rank}").exists, "the rank to wait")
        return pid


@pytest.fixture
async def ranks(run_dir: RunDir, request: pytest.FixtureRequest) -> AsyncIterator[Ranks]:
    """Ranks of a fork server, which is closed at the end; the parameter is `spawn_s`."""
    made = Ranks(run_dir, getattr(request, "param", 10.0))
    yield made
    await made.server.close()


@pytest.mark.parametrize(
    ("action", "code", "said"),
    [
        (["exit", 0], 0, "rank 0 of 3 replicas"),
        (["exit", 76], 76, ""),
        (["raise", "memory", "on purpose"], EXIT_RETRYABLE, "MemoryError: on purpose"),
        (["bad-config"], EXIT_CONFIG, "ConfigError: model.dim: got 3"),
    ],
)
async def test_a_rank_ends_with_the_code_of_its_entry_and_its_output_is_in_its_log(
    run_dir: RunDir, plan: Plan, ranks: Ranks, action: list[object], code: int, said: str
) -> None:
    plan({"0": {"0": {"0": action}}})
    pid = await ranks.spawn()
    await async_until(lambda: ranks.exits, "the exit")
    assert ranks.exits == {pid: code}
    assert said in run_dir.rank_log(0, 0).read_text()


async def test_a_rank_has_no_descriptor_of_the_server_of_one_thread_and_names_its_run(ranks, run_dir) -> None:
    log = run_dir.path / "uncalled.log"
    await ranks.server.spawn(env={"RANK": "1"}, config=run_dir.config, log=log, on_exit=lambda *_: None)
    pid = await ranks.spawn_waiting()
    rank = psutil.Process(pid)
    assert psutil.Process(ranks.server.pid).num_threads() == 1, "a fork has none of the threads"
    links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert not [link for link in links if link.startswith(("socket:", "pipe:"))]
    assert str(run_dir.path) in rank.cmdline()
    assert os.getsid(pid) != os.getsid(0)
    await ranks.server.close()
    await async_until(lambda: not alive({"pid": pid}), "the rank to die with its server")


async def test_when_the_server_dies_its_ranks_go_on_and_another_one_is_started(ranks: Ranks) -> None:
    pids = [await ranks.spawn_waiting(rank) for rank in (0, 1)]
    first = ranks.forker
    os.kill(first, signal.SIGKILL)
    await async_until(lambda: ranks.server.pid not in (None, first), "another server, though nobody asked for it")
    assert ranks.lost == [(first, "the fork server died")]
    assert ranks.exits == {}
    assert all(alive({"pid": pid}) for pid in pids)
    assert {psutil.Process(pid).ppid() for pid in pids} == {os.getpid()}
    await ranks.spawn_waiting(2)
    os.kill(pids[0], signal.SIGTERM)
    ranks.server.signal(pids[1], signal.SIGKILL)
    await async_until(lambda: len(ranks.exits) == 2, "exits of ranks of the server that is gone")
    assert ranks.exits == {pids[0]: -signal.SIGTERM, pids[1]: -signal.SIGKILL}
    await ranks.server.close()
    assert len(ranks.exits) == 3


async def test_the_end_waits_for_a_server_that_was_given_up(run_dir, monkeypatch) -> None:
    """Otherwise its transport is left open, of which Python warns on stderr."""
    waited: list[int] = []
    wait = asyncio.subprocess.Process.wait

    async def ended(process: asyncio.subprocess.Process) -> int:
        code = await wait(process)
        waited.append(process.pid)
        return code

    monkeypatch.setattr(asyncio.subprocess.Process, "wait", ended)
    ranks = Ranks(run_dir, spawn_s=0.1)
    await ranks.server.start()
    first = ranks.forker
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(Retryable, match="did not fork within"):
        await ranks.spawn()
    await ranks.server.close()
    assert first in waited


async def test_a_start_that_is_cancelled_leaves_no_log_open(run_dir: RunDir) -> None:
    server = ForkServer(run_dir.path, entry="tests.support.launch.standin:main", preload=())
    for _ in range(20):  # the thread that opens it is at another place each time
        start = asyncio.create_task(server.start())
        await asyncio.sleep(0)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
    await server.close()
    gc.collect()  # a warning is an error


@pytest.mark.parametrize("ranks", [3.0], indirect=True)
async def test_a_frozen_server_costs_one_start_and_no_rank(ranks: Ranks) -> None:
    uncalled = await ranks.spawn_uncalled()
    pid = await ranks.spawn_waiting()
    first = ranks.forker
    os.kill(first, signal.SIGSTOP)
    await ranks.stopped(pid)  # without the server
    with pytest.raises(Retryable, match=r"^the fork server did not fork within 3 s$"):
        await ranks.spawn(1)
    assert [pid for pid, _ in ranks.lost] == [first]
    await async_until(lambda: not alive({"pid": first}), "its end: it may not fork later")
    ranks.server.assign(uncalled, ranks.assignment(2, 0))
    await async_until((ranks.run.path / "waiting-0-0-2").exists, "the spare of the old server, which is called")
    await ranks.spawn_waiting(1)
    assert alive({"pid": pid})
    await ranks.killed(pid)


async def test_all_that_a_rank_started_ends_with_it(run_dir: RunDir, plan: Plan) -> None:
    """Also what leads a session, hears no SIGTERM, or has another environment. Other ranks keep theirs."""
    plan({"0": {"0": {"0": ["family"], "1": ["family"]}}})
    ranks = Ranks(run_dir)
    pids = [await ranks.spawn_waiting(rank) for rank in (0, 1)]
    gone, kept = (set(map(int, (run_dir.path / f"family-0-0-{rank}").read_text().split())) for rank in (0, 1))
    other = subprocess.Popen(["true"])  # noqa: ASYNC220 - not from a rank: its owner waits for it
    ranks.server.signal(pids[0], signal.SIGKILL)
    await async_until(lambda: not any(map(psutil.pid_exists, gone)), "all of the rank to end, and to be reaped")
    assert len(gone) == len(kept) == 5
    assert all(map(psutil.pid_exists, kept))
    (orphan,) = (pid for pid in kept if psutil.Process(pid).ppid() == os.getpid())
    os.kill(orphan, signal.SIGKILL)
    await async_until(lambda: not psutil.pid_exists(orphan), "it to be reaped, although its rank runs")
    await ranks.server.close()
    assert not any(map(psutil.pid_exists, kept))
    assert other.wait() == 0


def test_a_process_of_a_job_has_no_place_in_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = ("RANK", "TORCHELASTIC_USE_AGENT_STORE", "PET_NNODES", "SLURM_PROCID", "PMI_RANK", "MASTER_PORT")
    stays = ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "SLURM_TOPOLOGY_ADDR", "SLURM_JOB_ID")
    for name in (*foreign, *stays, "FT_HSDP_HOST", "FT_HSDP_NODE"):
        monkeypatch.setenv(name, "1")
    assert environment().keys() & {*foreign, *stays, "FT_HSDP_HOST"} == {*stays, "FT_HSDP_HOST"}
    monkeypatch.setenv(MARK_VARIABLE, UNMARKED)  # in a rank of ours its host is no wish of an operator
    assert environment().keys() & {"FT_HSDP_HOST", "FT_HSDP_NODE", MARK_VARIABLE} == set()


async def test_a_rank_that_was_never_heard_of_is_gone_at_the_end(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_hsdp.launch.backend.forkserver._Server._deliver", lambda *_: None)

    def forked(server: int) -> list[psutil.Process]:
        ours = psutil.Process().children()
        return [child for child in ours if os.getsid(child.pid) == server != child.pid]

    await ranks.server.start()
    server = ranks.forker
    start = asyncio.create_task(ranks.spawn())
    await async_until(lambda: forked(server), "the rank")
    (rank,) = forked(server)
    rank.suspend()  # it cannot end by itself
    start.cancel()
    await ranks.server.close()
    assert not psutil.pid_exists(rank.pid)


async def test_a_fork_that_fails_costs_no_other_rank(ranks: Ranks) -> None:
    pid = await ranks.spawn_waiting()
    server = ranks.forker
    limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (psutil.Process(server).num_fds(), limits[1]))
    with pytest.raises(Retryable, match=r"^the fork server cannot fork: Too many open files$"):
        await ranks.spawn(1)
    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
    await ranks.spawn_waiting(1)
    assert (ranks.server.pid, ranks.exits, alive({"pid": pid})) == (server, {}, True)


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "no process"), RuntimeError("no thread")])
async def test_a_server_that_cannot_be_started_is_retried(ranks, monkeypatch, error) -> None:
    async def none(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as without:
        without.setattr(asyncio, "create_subprocess_exec", none)
        with pytest.raises(Retryable, match=r"does not start: no (process|thread)"):
            await ranks.spawn()
    await ranks.spawn_waiting()


async def test_a_scheduler_that_tells_every_process_to_end_does_not_kill_ranks_that_leave(ranks: Ranks) -> None:
    pids = [await ranks.spawn_waiting(rank) for rank in (0, 1)]
    os.kill(ranks.forker, signal.SIGTERM)
    ranks.server.signal(pids[0], signal.SIGTERM)
    await async_until(lambda: ranks.exits, "the rank's own end")
    assert ranks.exits == {pids[0]: -signal.SIGTERM}, "a stand-in does not leave, but it was told"
    assert alive({"pid": pids[1]})


async def test_an_import_that_fails_is_one_line(run_dir: RunDir) -> None:
    server = ForkServer(run_dir.path, entry="no.such_module:main", preload=())
    with pytest.raises(Retryable, match=r"cannot load no\.such_module:main: ModuleNotFoundError") as caught:
        await server.start()
    assert len(str(caught.value).splitlines()) == 1
    await server.close()


async def test_imports_that_start_a_thread_are_refused(run_dir, tmp_path, monkeypatch) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = ForkServer(run_dir.path, entry=STANDIN, preload=("threaded",))
    with pytest.raises(Retryable, match="left 2 threads running"):
        await server.start()
    await server.close()


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_with_many_open_files_looks_whether_it_was_called(told, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(zygote, "_redirect", lambda _: None)
    monkeypatch.setattr(os, "environ", {})
    ours, theirs = socket.socketpair()
    with ours, theirs, raised(ours) as high:
        line = zygote.AssignmentLine(high)
        if told:
            call = {"replica": 1, "run_id": "a", "restarts": 2, "log": str(tmp_path / "log")}
            theirs.sendall(json.dumps(call).encode() + b"\n")
        found = line.poll()
    assert (found is not None) == told
    assert found is None or (found.replica, found.restarts) == (1, 2)


def test_a_rank_whose_supervisor_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(SystemExit) as ended:
        zygote.AssignmentLine(ours).poll()
    assert ended.value.code == 75
