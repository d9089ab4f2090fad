"""``python -m lighthouse --run RUNDIR [--port N | --fd N] [--seat N] [--url URL]``: serve a job until SIGTERM.

The lighthouse cannot know when the job needs it no more. So it ends as if the signal had ended it: Kubernetes,
which sends that signal when it moves a pod to another node, then starts it there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import uvicorn
from starlette.types import ASGIApp

from ft_hsdp import address, tls
from ft_hsdp.claim import Claim, FolderOwner
from ft_hsdp.config import load
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError
from ft_hsdp.jsonl import Journal, read_object, replace_json
from ft_hsdp.lifetime import forgiving, identity, outlive_notices, stop_signals
from lighthouse.ha import instance
from lighthouse.http import connections
from lighthouse.http.access import Keys, RequestGate
from lighthouse.http.rate_limits import Rates
from lighthouse.journal.database import DatabaseFailed, SqliteDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.runtime import LeaderRuntime, begin
from lighthouse.service import STORE_RETRY_S, Service
from lighthouse.store import SqliteStore, Store, StoreFailed

if TYPE_CHECKING:
    from lighthouse.ha.candidate import Candidate

LOOK_S = 1.0  # between two looks at lighthouse.json
BEAT_S = 0.25  # between two signs of life
SAY_S = 10.0  # between two lines about a disk that is full

Made = TypeVar("Made")

_log = logging.getLogger("lighthouse")


class Server(uvicorn.Server):
    """uvicorn's server; it tells its role when it listens, and before it ends.

    Args:
        beats: Whether it shows on its standard output that its event loop runs: on this way no client is before
            the process that asks.
    """

    def __init__(self, config: uvicorn.Config, role: Alone | Candidate, beats: bool) -> None:
        super().__init__(config)
        self._role = role
        self._beating = beats

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._role.begin(self.end)
        if self._beating:
            os.set_blocking(sys.stdout.fileno(), False)
            self._beat()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens: its supervisor is stopped, or gone
            os.write(sys.stdout.fileno(), b".")
        asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._role.close()
        await super().shutdown(sockets)

    def end(self) -> None:
        """Make the server end soon; may be called from a signal handler."""
        self.should_exit = True


class Alone:
    """The role of a lighthouse that is the only one of its job: it leads as long as it runs."""

    def __init__(
        self, run: Path, url: str, claim: Claim, service: Service, journal: JobJournal, app: ASGIApp
    ) -> None:
        self.app = app
        self._claim = claim
        self._journal = journal
        self._run = run
        self._url = url
        self._service = service
        self._said: dict[str, object] = {}
        self._keeping: asyncio.Task[None] | None = None

    def begin(self, end: Callable[[], None]) -> None:
        """Write where it listens to lighthouse.json, now that the port is open.

        Args:
            end: Called when the run is of another job.
        """
        self._said = {**identity(), "url": self._url, "urls": [self._url]}
        self._write()
        self._keeping = asyncio.create_task(self._keep(end))
        self._journal.begin()
        state = self._service.state
        _log.info("listens on %s; term %d, epoch %d", self._url, state.term, state.epoch)

    def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        self._service.close()
        self._journal.close()

    def _write(self) -> None:
        try:
            replace_json(self._run / "lighthouse.json", self._said)
        except OSError as error:
            _log.error("lighthouse.json is not written: %s", error.strerror)

    async def _keep(self, end: Callable[[], None]) -> None:
        """Write lighthouse.json again whenever it is gone or names no lighthouse, while the run is this job's."""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._claim.lost:
                return end()
            await asyncio.to_thread(self._put_back)

    def _put_back(self) -> None:
        if not read_object(self._run / "lighthouse.json").get("url"):
            self._write()


def url(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{address.join(address.reached(str(host).partition('%')[0]), port)}"


def advertised(sock: socket.socket, scheme: str = "http") -> str:
    """Return the URL under which processes of other machines reach ``sock``, as far as this one can know it."""
    host, port = sock.getsockname()[:2]
    if address.unspecified(str(host)):
        with contextlib.suppress(OSError):  # this machine's name is not known
            socket.getaddrinfo(name := socket.gethostname(), port, sock.family, socket.SOCK_STREAM)
            return f"{scheme}://{name}:{port}"
    return url(sock, scheme)


def serve(
    run: Path,
    port: int | None,
    number: int | None = None,
    said: str | None = None,
    held: int | None = None,
) -> int | None:
    """Serve the job in ``run`` until SIGTERM.

    Args:
        port: Instead of network.port; None: that one.
        number: Of this lighthouse among several in the run directory; None: a free one.
        said: URL under which others reach it; None: where it listens.
        held: Descriptor of a socket that listens already: its owner keeps the port while no lighthouse runs, and
            reads signs of life from standard output.

    Returns:
        The port if this process must start over because it lost the lead; None: it is done.

    Raises:
        ConfigError: the configuration, the store or the port cannot be used.
        SystemExit: after a signal.
    """
    config = load(run / "config.yaml")
    keys = Keys.read(run / "token", run / "admin_token")
    context = tls.server(config.network)
    scheme = "http" if context is None else "https"
    known = bool(keys.job) or config.network.tls_ca is not None
    events = Journal(run / "lighthouse" / "events.jsonl")
    told: list[dict[str, object]] = []  # before there is a journal

    def note(event: str, reason: str) -> None:
        told.append({"t": time.time(), "event": event, "source": "lighthouse", "reason": reason})
        events(told[-1])

    def lead(url: str, store: Store, database: SqliteDatabase, gap: int) -> LeaderRuntime:
        leading = begin(config, run, keys, store, database, gap, url, events)
        leading.journal.note(told)
        return leading

    def listening() -> socket.socket:
        if held is not None:
            sock = socket.socket(fileno=os.dup(held))
            if not known:
                address.check_loopback(str(sock.getsockname()[0]))
            return sock
        return address.listen(config.network.host, config.network.port if port is None else port, known=known)

    if not config.lighthouse.etcd:
        allowed = "a run that no other job has"
        claim = Claim(run, FolderOwner.of(run.resolve().name, keys.job)).take("--run", str(run), allowed)
        store = _patiently(lambda: SqliteStore(run / "lighthouse" / "store.sqlite", note))
        try:
            database = _patiently(lambda: SqliteDatabase(run / "lighthouse" / "journal.sqlite", note=note))
            try:
                sock = listening()
                place = url if held is not None else advertised  # who holds the socket is on this machine
                where = said or place(sock, scheme)
                leading = _patiently(lambda: lead(where, store, database, 0))
                role = Alone(run, where, claim, *leading)
                _run(role, sock, keys, context, held is not None)
            finally:
                database.close()
        finally:
            store.close()
            claim.release()
        claim.check()
        return None
    from lighthouse.ha.candidate import Candidate  # a lighthouse that is alone starts sooner without its libraries

    lock = instance.InstanceLock(run, number)
    sock = listening()
    bound = int(sock.getsockname()[1])
    where = said or advertised(sock, scheme)
    candidate = Candidate(config, lock, where, keys, partial(lead, where), events)
    try:
        _run(candidate, sock, keys, context, held is not None)
    finally:
        candidate.end()
    return bound if candidate.deposed else None


def _patiently(make: Callable[[], Made]) -> Made:
    """Return what ``make`` returns; try again while the disk is full, since ending would not help the job."""
    said = 0.0
    while True:
        try:
            return make()
        except (StoreFailed, DatabaseFailed) as error:
            if not said or time.monotonic() - said > SAY_S:
                said = time.monotonic()
                _log.error("%s; the lighthouse waits until the disk takes writes", error)
            time.sleep(STORE_RETRY_S)


def _run(
    role: Alone | Candidate, sock: socket.socket, keys: Keys, context: ssl.SSLContext | None, beats: bool
) -> None:
    """Serve ``role`` at ``sock`` until it ends. Raises SystemExit after a signal that tells it to end."""
    told: list[int] = []

    def end(signal_number: int, _: object) -> None:
        told.append(signal_number)
        server.end()

    app = RequestGate(role.app, keys, Rates())
    server = Server(uvicorn.Config(app, **connections.options(connections.Connections(), context)), role, beats)
    outlive_notices()
    for number in stop_signals():
        signal.signal(number, end)  # uvicorn has handlers of its own, and raises the signal again at its end
    gc.collect()
    gc.freeze()  # what is loaded by now stays: no collection has to look at it again
    server.run(sockets=[sock])
    if told:
        raise SystemExit(128 + told[0])


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        allowed = f"--run RUNDIR [--port N | --fd N] [--seat N] [--url URL] ({message})"
        raise ConfigError("arguments", " ".join(sys.argv[1:]), allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and serve; an error is one line on stderr."""
    logging.basicConfig(
        stream=forgiving(2, patient=True),  # its log may be on a disk that hangs
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    parser = _Arguments(prog="python -m lighthouse", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--port", type=int, help="instead of network.port")
    parser.add_argument("--fd", type=int, help="a socket that listens, instead of a port; beats go to stdout")
    parser.add_argument("--seat", type=int, help="which of several lighthouses in this run directory")
    parser.add_argument("--url", help="where others reach it, if that is not where it listens")
    try:
        chosen = parser.parse_args(arguments)
        if chosen.port is not None and not 0 <= chosen.port <= 65535:
            raise ConfigError("network.port", chosen.port, "0 to 65535")
        if chosen.seat is not None and not 0 <= chosen.seat < instance.MAX_INSTANCES:
            raise ConfigError("--seat", chosen.seat, f"0 to {instance.MAX_INSTANCES - 1}")
        port = serve(chosen.run, chosen.port, chosen.seat, chosen.url, chosen.fd)
        if port is not None:
            place = {"--port": port} if chosen.fd is None else {"--fd": chosen.fd}
            _start_over(chosen.run, {**place, "--seat": chosen.seat, "--url": chosen.url})
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


def _start_over(run: Path, given: Mapping[str, object]) -> NoReturn:
    """Replace this process by a fresh lighthouse on the same port: what this one remembers is out of date."""
    more = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    command = [sys.executable, "-m", "lighthouse", "--run", str(run), *more]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is what we want


if __name__ == "__main__":
    sys.exit(main())
