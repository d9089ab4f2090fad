"""A lighthouse as a process behind its gate, and talking to it: as somebody who belongs there, and in raw bytes.

As a program (`python -m ... JSON`) it prints its URL, then serves. JSON: total (replicas), tick_s and handshake_s
(of the door), network (that section of the configuration); or, for the tests of the page, port and database of a
job of 20 replicas, of which one has a supervisor that reports. Whoever looks at that has time.
"""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import uvicorn
import uvloop

from ft_hsdp import protocol, tls
from ft_hsdp.config import Config, parse
from ft_hsdp.core.grant import Continue, Grant, Refused
from ft_hsdp.core.host_report import MachineRanks
from ft_hsdp.core.restart import RestartPolicy
from ft_hsdp.protocol import Wait
from lighthouse.http import connections
from lighthouse.http.access import RequestGate
from lighthouse.http.rate_limits import Rates
from lighthouse.journal.database import SqliteDatabase
from lighthouse.overview.overview import JobInfo
from lighthouse.placement.state import PlacementPolicy
from lighthouse.runtime import about as about_job
from tests.support.lighthouse.lighthouse_helpers import START, ask, at, name
from tests.support.lighthouse.signed import Signer
from tests.support.lighthouse.site import KEYS, VIEWER, Site

ROOT = Path(__file__).parents[3]
REPLICAS, STEPS = 20, 120_000  # of the job of the page
AUTHORIZED = b"authorization: of this request\r\n"  # stands for the header in `Server.signed`


class Server:
    def __init__(self, process, url, log):
        self.process = process
        self.url = url
        self.log = log
        self.address = (urlsplit(url).hostname, urlsplit(url).port)
        self._signer = Signer(url)

    def client(self, **arguments):
        defaults = {"base_url": self.url, "headers": VIEWER, "timeout": 10.0, "trust_env": False}
        return httpx.Client(**{**defaults, **arguments})

    def headers(self, method, path, body=b""):
        return self._signer.headers(method, path, body)

    def signed(self, data, body=b""):
        """A request in raw bytes, its placeholder replaced by the header of a worker's."""
        if AUTHORIZED not in data:
            return data
        method, path, _ = data.split(b" ", 2)
        line = f"authorization: {self.headers(method.decode(), path.decode(), body)['Authorization']}\r\n"
        return data.replace(AUTHORIZED, line.encode())

    def post(self, path, content, headers=None, timeout=10.0):
        """(status, content) of a request on a connection of its own, signed unless there are headers."""
        headers = self.headers("POST", path, content) if headers is None else headers
        http = HTTPConnection(*self.address, timeout=timeout)
        try:
            http.request("POST", path, content, headers)
            answer = http.getresponse()
            return answer.status, answer.read()
        finally:
            http.close()

    def connect(self, timeout=5.0):
        return socket.create_connection(self.address, timeout)

    def say(self, data, timeout=5.0):
        """(answer, how it ended: closed, or open) to raw bytes on a connection of their own."""
        with self.connect(timeout) as sock:
            try:
                sock.sendall(data)
                answer = read(sock)
            except (BrokenPipeError, ConnectionResetError):
                return b"", "closed"
            return answer


def read(sock):
    """(what comes, closed or open)"""
    answer = b""
    try:
        while data := sock.recv(65536):
            answer += data
    except TimeoutError:
        return answer, "open"
    except ConnectionResetError:
        pass
    return answer, "closed"


@contextmanager
def guarded(tmp_path, **told):
    """A server; killed at the end, when nothing in its log may be a traceback."""
    log = tmp_path / "guarded.log"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lighthouse.guarded", json.dumps(told)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        url = process.stdout.readline().strip()
        assert url, log.read_text()
        yield Server(process, url, log)
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    said = log.read_text()
    assert "Traceback" not in said, said
    assert len(said) < 100_000, "it writes down what strangers send"


class Healthy:
    """Replica 0, which trains step after step; counts its answers."""

    def __init__(self, server):
        self.answers, self.problem = 0, None
        self._server = server
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        self.more(3)
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(10)

    def more(self, answers=5, seconds=30.0):
        wanted, deadline = self.answers + answers, time.monotonic() + seconds
        while self.answers < wanted:
            assert self.problem is None, self.problem
            assert time.monotonic() < deadline, f"{self.answers} of {wanted} answers"
            time.sleep(0.01)

    def _run(self):
        try:
            self._train()
        except Exception as error:
            self.problem = repr(error)

    def _train(self):
        gone = protocol.ProcessReport(machine=MachineRanks(name(1), "here", 1, gone=True, done=True))
        assert self._server.post("/v1/processes", protocol.encode(gone))[0] == 200
        state, epoch = START, 0
        while not self._end.is_set():
            code, content = self._server.post("/v1/quorum", protocol.encode(ask(0, state, epoch=epoch)))
            assert code == 200, content
            said = protocol.decode(content, Grant, Continue, Wait, Refused)
            assert not isinstance(said, Refused), said
            if isinstance(said, Grant):
                epoch = said.epoch
            elif isinstance(said, Continue):
                state = at(epoch, state.step + 1)
            self.answers += 1
            time.sleep(0.002)


async def main() -> None:
    told = json.loads(sys.argv[1])
    context = tls.server(parse({"network": told.get("network", {})}).network)
    connections.HANDSHAKE_S = told.get("handshake_s", connections.HANDSHAKE_S)
    site = long_run(Path(told["database"])) if "database" in told else Site(steps=10**6, long_poll_s=1.0)
    site.journal.begin()
    app = site.gate if "database" in told else RequestGate(site.app, KEYS, Rates())
    guests = connections.Connections(tick_s=told.get("tick_s", connections.TICK_S))
    server = uvicorn.Server(uvicorn.Config(app, **connections.options(guests, context)))
    sock = socket.create_server(("127.0.0.1", told.get("port", 0)), backlog=1024)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(f"{'http' if context is None else 'https'}://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await serving


def long_run(database: Path) -> Site:
    """A lighthouse with a made-up past."""
    about = JobInfo("pretrain", REPLICAS, 2, STEPS, config=about_job(Config()).config)
    chosen = {"steps": STEPS, "evict_s": 600.0, "placing": PlacementPolicy(1, 2, RestartPolicy(3, 0.0))}
    site = Site(REPLICAS, SqliteDatabase(database), about, job="pretrain", **chosen)
    site.service.processes(protocol.ProcessReport("3-run-0"))
    return site


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    uvloop.run(main())
