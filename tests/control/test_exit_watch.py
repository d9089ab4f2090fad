"""The process that tells the lighthouse of the end of ranks that no supervisor of ours watches."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from ft_hsdp import protocol
from ft_hsdp.config.network import NetworkConfig
from ft_hsdp.control.exit_watch import Watched, shares, start
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.http_proof import HEADER
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.protocol import ProcessReport, SupervisorReply
from tests.support.answering import Answering, serving
from tests.support.lighthouse.signed import proof

TOKEN = "ab" * 32
NAME = "3-run-2"


class Lighthouse(ThreadingHTTPServer):
    """Refuses the first report, takes the next."""

    told: Queue[ProcessReport]
    refuse = 1


class Answer(Answering):
    server: Lighthouse

    def do_POST(self) -> None:
        body = self.body()
        self.server.refuse -= 1
        if self.server.refuse >= 0:
            self._proved(503, b"")
            return
        told = protocol.decode(body, ProcessReport)
        self.server.told.put(told)
        gone = told.machine is not None and told.machine.gone
        self._proved(200, protocol.encode(SupervisorReply(0, False, exited=gone)))

    def _proved(self, status: int, body: bytes) -> None:
        self.answer(status, body, {HEADER: proof(self.headers["Authorization"], status, body, TOKEN)})


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    server = Lighthouse(("127.0.0.1", 0), Answer)
    server.told = Queue()
    with serving(server):
        yield server


def watched(pids: tuple[int, ...], url: str, **changes: Any) -> Watched:
    alone = Watched(NAME, "here", 1, pids, (url,), TOKEN, "", None, NetworkConfig(), 30.0, 0.05)
    return replace(alone, **changes)


def test_a_machine_of_several_says_also_that_its_ranks_live(tmp_path: Path, lighthouse: Lighthouse) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    url = f"http://127.0.0.1:{lighthouse.server_port}"
    watch = start(watched((rank.pid,), url, machines=2), tmp_path / "log")
    alive = ProcessReport(machine=MachineRanks(NAME, "here", 2, gone=False))
    assert [lighthouse.told.get(timeout=30) for _ in range(2)] == [alive, alive]
    rank.communicate()
    assert watch.wait(30) == 0


def test_each_host_has_one_watch_and_containers_with_one_name_have_none() -> None:
    for places, expected in [
        ([("a", "s", 1), ("a", "s", 2)], [(1, (1, 2)), (1, ())]),
        ([("a", "s", 1), ("b", "t", 1), ("b", "t", 2)], [(2, (1,)), (2, (1, 2)), (2, ())]),
        ([("a", "s", 1), ("a", "t", 1)], [(0, ()), (0, ())]),
    ]:
        assert [shares(places, rank) for rank in range(len(places))] == expected


def test_the_lighthouse_hears_of_the_end_of_the_last_rank(tmp_path: Path, lighthouse: Lighthouse) -> None:
    """Not before: an incarnation of which a rank lives has not exited. One that refuses is asked again."""
    ranks = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    pids = tuple(rank.pid for rank in ranks)
    url = f"http://127.0.0.1:{lighthouse.server_port}"
    watch = start(watched(pids, url), tmp_path / "log")
    ranks[0].communicate()
    assert lighthouse.told.empty()
    assert watch.poll() is None
    ranks[1].communicate()
    assert lighthouse.told.get(timeout=30) == ProcessReport(machine=MachineRanks(NAME, "here", 1, gone=True))
    assert watch.wait(30) == 0
    assert (tmp_path / "log").read_text() == ""


def test_the_watch_ends_when_the_run_is_removed(tmp_path: Path) -> None:
    """A lighthouse that is away may come back, but not that of a run whose folder is gone."""
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listed, nobody = tmp_path / "lighthouse.json", f"http://127.0.0.1:{free_port('127.0.0.1')}"
    listed.write_text(json.dumps({"url": nobody}))
    watch = start(watched((rank.pid,), nobody, listed=str(listed), patience_s=3600.0), tmp_path / "log")
    rank.communicate()
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(2)
    listed.unlink()
    assert watch.wait(60) == 1
