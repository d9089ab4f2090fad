"""The process that tells the lighthouse of the end of ranks that no supervisor of ours watches."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from ft_hsdp import protocol
from ft_hsdp.config.network import NetworkConfig
from ft_hsdp.control.exit_watch import Watched, start
from ft_hsdp.http_proof import HEADER
from ft_hsdp.launch.backend.processes import free_port
from ft_hsdp.protocol import ProcessReport, SupervisorReply
from tests.support.lighthouse.signed import proof

TOKEN = "ab" * 32
NAME = "3-run-2"


class Lighthouse(HTTPServer):
    """Refuses the first report, takes the next."""

    told: Queue[ProcessReport]
    refuse = 1


class Answer(BaseHTTPRequestHandler):
    server: Lighthouse

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.refuse -= 1
        if self.server.refuse >= 0:
            self._answer(503, b"")
            return
        self.server.told.put(protocol.decode(body, ProcessReport))
        answer = protocol.encode(SupervisorReply((), 0, 0, False))
        self._answer(200, answer)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header(HEADER, proof(self.headers["Authorization"], status, body, TOKEN))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def lighthouse() -> Iterator[Lighthouse]:
    server = Lighthouse(("127.0.0.1", 0), Answer)
    server.told = Queue()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_lighthouse_hears_of_the_end_of_the_last_rank(tmp_path: Path, lighthouse: Lighthouse) -> None:
    """Not before: an incarnation of which a rank lives has not exited. One that refuses is asked again."""
    ranks = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    pids = tuple(rank.pid for rank in ranks)
    url = f"http://127.0.0.1:{lighthouse.server_port}"
    watch = start(Watched(NAME, pids, (url,), TOKEN, "", None, NetworkConfig(), 30.0), tmp_path / "log")
    ranks[0].communicate()
    assert lighthouse.told.empty()
    assert watch.poll() is None
    ranks[1].communicate()
    assert lighthouse.told.get(timeout=30) == ProcessReport({}, (NAME,))
    assert watch.wait(30) == 0
    assert (tmp_path / "log").read_text() == ""


def test_the_watch_ends_when_the_run_is_removed(tmp_path: Path) -> None:
    """A lighthouse that is away may come back, but not that of a run whose folder is gone."""
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    listed, nobody = tmp_path / "lighthouse.json", f"http://127.0.0.1:{free_port('127.0.0.1')}"
    listed.write_text(json.dumps({"url": nobody}))
    watched = Watched(NAME, (rank.pid,), (nobody,), TOKEN, "", str(listed), NetworkConfig(), 3600.0)
    watch = start(watched, tmp_path / "log")
    rank.communicate()
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(2)
    listed.unlink()
    assert watch.wait(60) == 1
