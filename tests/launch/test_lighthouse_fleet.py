"""The lighthouses of a job on one machine, as `up` keeps them: real processes, elected by a real etcd."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ft_hsdp.config import parse
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch import lighthouse_process
from ft_hsdp.launch.lighthouse_process import LighthouseFailed, LighthouseFleet, LighthouseProcess, check_port
from ft_hsdp.launch.run.directory import Row, RunDir, read_json, write_job_files
from tests.support.running import running
from tests.support.waiting import async_until

pytestmark = pytest.mark.multiproc


def fleet(folder: Path, **lighthouse: Any) -> tuple[LighthouseFleet, RunDir, list[Row]]:
    run, events = RunDir(folder / "job"), []  # type: tuple[RunDir, list[Row]]
    config = parse({"job": {"name": "job"}, "lighthouse": lighthouse})
    write_job_files(run, config)
    return LighthouseFleet(run, config, events.append), run, events


def processes(run: RunDir) -> set[int]:
    """The pids of all lighthouses of a run that live."""
    return {process.pid for process, line in running(os.getpid()).items() if str(run.path) in line}


@contextlib.asynccontextmanager
async def kept(lighthouse: Any) -> AsyncIterator[None]:
    """It is started and kept, and stopped at the end."""
    await lighthouse.start()
    keeping = asyncio.create_task(lighthouse.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await lighthouse.stop()


async def test_an_etcd_that_is_not_there_is_one_line_and_69(tmp_path, monkeypatch) -> None:
    one, _, _ = fleet(tmp_path, etcd=["http://127.0.0.1:1"])
    monkeypatch.setattr(one, "_listen_s", 0.5)  # its processes have longer to listen
    try:
        with pytest.raises(LighthouseFailed, match=r"does etcd at http://127\.0\.0\.1:1 answer\?") as caught:
            await one.start()
        assert caught.value.exit_code == 69
    finally:
        await one.stop()


def third_of_three(held: contextlib.ExitStack) -> int:
    """A port that is taken after two that are free."""
    while True:
        port = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        try:
            for free in (port - 2, port - 1):
                socket.create_server(("127.0.0.1", free)).close()
        except OSError:
            continue
        return int(port)


def test_the_ports_of_all_are_looked_at() -> None:
    with contextlib.ExitStack() as held:
        port = third_of_three(held)
        chosen = {"etcd": ["http://127.0.0.1:1"], "count": 3}
        with pytest.raises(ConfigError, match=rf"network\.port: got {port}"):
            check_port(parse({"network": {"port": port - 2}, "lighthouse": chosen}))


@mock.patch.object(lighthouse_process, "SLOWEST_S", 0.0)
async def test_a_lighthouse_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch) -> None:
    """The machine has no process left, no descriptor, no thread, for however long; nothing ends with that."""
    full = [BlockingIOError(errno.EAGAIN, "fork"), OSError(errno.EMFILE, "pipe"), RuntimeError("no thread")] * 350
    start = asyncio.create_subprocess_exec

    async def start_later(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        if full:
            raise full.pop()
        return await start(*command, **options)

    alone, run, events = fleet(tmp_path)
    async with kept(alone):
        said = read_json(run.lighthouse)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_later)
        os.kill(said["pid"], signal.SIGKILL)
        await async_until(lambda: [e for e in events if e.get("over")], "another one listens")
        assert read_json(run.lighthouse)["url"] == said["url"]
        assert [e["event"] for e in events].count("LighthouseFailed") == 1050
    assert not processes(run)


async def test_the_port_of_a_dead_lighthouse_stays_with_the_job(tmp_path: Path) -> None:
    """No other process gets it, at this address or at all of them; who calls meanwhile is answered by the next."""
    run, events = RunDir(tmp_path / "job"), []  # type: tuple[RunDir, list[Row]]
    config = parse({"job": {"name": "job"}})
    write_job_files(run, config)
    alone = LighthouseFleet(run, config, events.append, module="tests.support.launch.standin_lighthouse")
    await alone.start()
    try:
        said = read_json(run.lighthouse)
        port = int(said["url"].rpartition(":")[2])
        os.kill(said["pid"], signal.SIGKILL)
        await async_until(lambda: not processes(run), "it is gone")
        for host in ("127.0.0.1", "0.0.0.0", ""):
            with pytest.raises(OSError, match="in use"):
                socket.create_server((host, port))
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(b"OPTIONS / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await alone.start()
            assert (await asyncio.to_thread(caller.recv, 100)).startswith(b"HTTP/1.1 501")
        assert read_json(run.lighthouse)["url"] == said["url"]
    finally:
        await alone.stop()
    socket.create_server(("127.0.0.1", port)).close()


async def test_a_lighthouse_that_gives_no_sign_of_life_is_replaced(tmp_path: Path) -> None:
    """It is stopped for good: without another one, no membership could change any more."""
    _, run, events = fleet(tmp_path)
    alone = LighthouseProcess(run, parse({"timeouts": {"evict_s": 2.0}}), events.append)
    async with kept(alone):
        said = read_json(run.lighthouse)
        await asyncio.sleep(3.0)  # longer than it may be silent: it beats, and is left alone
        assert read_json(run.lighthouse) == said
        assert events == []
        os.kill(said["pid"], signal.SIGSTOP)
        await async_until(lambda: [e for e in events if e.get("over")], "another one listens")
        assert read_json(run.lighthouse)["url"] == said["url"]
        assert read_json(run.lighthouse)["pid"] != said["pid"]
        assert [e["event"] for e in events][:2] == ["LighthouseSilent", "LighthouseExited"]
