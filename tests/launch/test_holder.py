"""The holder of a host: an agent of it ends, and another one goes on with the ranks. They run in the test."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.base import COLD
from ft_hsdp.launch.backend.held import HeldForks
from ft_hsdp.launch.backend.processes import take_name
from ft_hsdp.launch.holder import Holder
from ft_hsdp.launch.run.directory import RunDir, read_json
from tests.support.launch.host_scene import STANDIN, Scene
from tests.support.launch.launch_helpers import Plan
from tests.support.waiting import async_until

# The process of an agent, which gives the test its end of the socket to the holder, and ends with a code from it.
AGENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as test:
    test.connect(sys.argv[1])
    socket.send_fds(test, [" ".join(sys.argv[4:]).encode() or b"first"], [int(sys.argv[3])])
    sys.exit(int(test.recv(8)))
"""

LOAD_S = 3.0


class Held:
    """A holder, and the newest agent that it has started."""

    def __init__(self, run: RunDir, folder: Path) -> None:
        self._run = run
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "agents"))
        self._listener.listen()
        self._listener.setblocking(False)
        command = [sys.executable, "-c", AGENT, str(folder / "agents")]
        self.running = asyncio.create_task(Holder(command, STANDIN, LOAD_S).run())
        self.scene: Scene | None = None

    async def agent(self) -> Scene:
        """The next agent that the holder starts, which has joined the job."""
        loop = asyncio.get_running_loop()
        self.process, _ = await loop.sock_accept(self._listener)
        self.process.setblocking(True)
        said, fds, _, _ = await asyncio.to_thread(socket.recv_fds, self.process, 64, 1)
        assert said == (b"first" if self.scene is None else b"--again"), "a later one waits for a lighthouse"
        self.forks = await HeldForks.connect(fds[0], lambda *_: None)
        await self.forks.start(self._run.path, [], 20.0, 10.0)
        self.scene = Scene(self._run, forks=self.forks, before=self.scene)
        await async_until(lambda: self.scene is None or self.scene.open, "a report")
        return self.scene

    async def two_ranks(self) -> None:
        scene = await self.agent()
        scene.answers(scene.assigned("0-a-0", 0, 1))
        await scene.waiting("0-0-0", "0-0-1")

    @property
    def agents(self) -> list[psutil.Process]:
        found = []
        for each in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # a child of another test, which has just ended
                found += [each] if AGENT in each.cmdline() else []
        return found

    async def lose_agent(self) -> None:
        """End it as SIGKILL does: it says nothing more."""
        (agent,) = self.agents
        agent.kill()
        await self.forks.close()
        assert self.scene is not None
        self.scene.running.cancel()
        await asyncio.gather(self.scene.running, return_exceptions=True)
        self.process.close()

    def end_agent(self, code: int) -> None:
        self.process.sendall(str(code).encode())

    async def close(self) -> None:
        self.running.cancel()
        if self.scene is not None:
            self.scene.running.cancel()
            await asyncio.gather(self.scene.running, return_exceptions=True)
        await asyncio.gather(self.running, return_exceptions=True)
        self.process.close()
        self._listener.close()


@pytest.fixture
async def held(run_dir: RunDir, tmp_path: Path) -> AsyncIterator[Held]:
    made = Held(run_dir, tmp_path)
    yield made
    await made.close()


async def pids(run: RunDir, replica: int) -> list[int]:
    await async_until(lambda: read_json(run.processes(replica)) is not None, "the ranks are listed")
    return [each["pid"] for each in read_json(run.processes(replica))["ranks"]]


async def test_ranks_go_on_without_their_agent_and_the_next_one_tells_how_they_ended(held, run_dir, plan) -> None:
    plan({"0": {"0": {"1": ["exit-when", "go", 7]}}})
    scene = await held.agent()
    first = scene.reports[-1]
    scene.answers(scene.assigned("0-a-0", 1, 2, of=4), scene.assigned("1-a-3", 0, of=1))
    await scene.waiting("0-0-2", "1-3-0")
    await async_until(lambda: scene.of("1-a-3").how == scene.of("0-a-0").how == COLD, "all are started")
    before = await pids(run_dir, 0), await pids(run_dir, 1)
    await held.lose_agent()
    (run_dir.path / "go").touch()
    await async_until(lambda: not psutil.pid_exists(before[0][0]), "a rank ends")
    scene = await held.agent()
    report = scene.reports[0]
    assert (report.life, report.space) == (first.life, first.space)
    assert report.number > first.number
    assert scene.agent.held["1-a-3"].report().pids == tuple(before[1]), "the other one's rank runs"
    assert (scene.of("1-a-3").living, scene.of("1-a-3").how) == ((0,), COLD)
    assert scene.agent.held["0-a-0"].assigned.hosts == ("h",) * 4
    await scene.reported("0-a-0", (), (1, 7, False), (2, -signal.SIGKILL, True))
    scene.answers(scene.assigned("1-a-3", 0, of=1))
    await async_until(lambda: scene.of("0-a-0") is None, "the end is known")
    await held.lose_agent()
    scene = await held.agent()
    assert [each.incarnation for each in scene.reports[0].ranks] == ["1-a-3"], "the holder has forgotten the other"
    scene.answers()
    await scene.reported("1-a-3", (), (0, -signal.SIGKILL, True))


async def test_ranks_that_were_not_all_started_end_and_so_does_a_spare(held: Held, run_dir: RunDir) -> None:
    scene = await held.agent()
    spares = []
    for rank, assigned in ((0, None), (1, {"replica": 0, "run_id": "a", "restarts": 0, "log": os.devnull})):
        env = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
        log, ended = run_dir.path / "log", list[int]()
        spares.append(
            await held.forks.spawn(
                env=env,
                assignment=assigned,
                config=scene.ranks.file,
                log=log,
                on_exit=lambda pid, _, ended=ended: ended.append(pid),  # type: ignore[misc]
            )
        )
    await held.lose_agent()
    scene = await held.agent()
    said = await scene.reported("0-a-0", (), (1, -signal.SIGKILL, True))
    assert said.failed
    assert not any(map(psutil.pid_exists, spares))


async def test_the_holder_ends_with_the_code_of_its_agent_and_no_rank_is_left(held: Held, run_dir: RunDir) -> None:
    await held.two_ranks()
    assert await held.forks.take_name("of-this-test")
    assert take_name("of-this-test") is None
    ranks = await pids(run_dir, 0)
    await held.forks.close()
    held.end_agent(76)
    assert await held.running == 76
    assert not any(map(psutil.pid_exists, ranks))


async def test_a_signal_reaches_the_agent_once_it_is_ready(held: Held, plan: Plan) -> None:
    await held.two_ranks()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    assert not held.running.done(), "its ranks have to leave first"
    await held.forks.ready()
    await held.forks.close()  # the stand-in ends by the signal
    assert await held.running == 128 + signal.SIGTERM


async def test_a_signal_ends_an_agent_that_does_not_get_ready_and_its_ranks(held: Held, run_dir: RunDir) -> None:
    await held.two_ranks()
    ranks = await pids(run_dir, 0)
    os.kill(os.getpid(), signal.SIGTERM)
    await async_until(lambda: held.agents == [], "the agent is killed")
    await held.forks.close()
    assert await held.running == 128 + signal.SIGTERM
    assert not any(map(psutil.pid_exists, ranks))


async def test_an_order_that_the_holder_does_not_know_is_refused(held: Held) -> None:
    await held.agent()
    with pytest.raises(Retryable):
        await held.forks.order("retire")
