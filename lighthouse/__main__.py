"""``python -m lighthouse --run RUNDIR [--port N]``: the lighthouse of one run, until SIGTERM."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import uvicorn

from ft_hsdp.config import Config, config_hash, load
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError
from ft_hsdp.events import Journal
from lighthouse.api import create_app
from lighthouse.service import Service
from lighthouse.state import Policy
from lighthouse.store import SqliteStore

TOKEN_VARIABLE = "FT_HSDP_TOKEN"  # noqa: S105 - the name of a variable
BACKLOG = 1024
CONNECTIONS = 1024
KEEP_ALIVE_S = 75
HEADER_BYTES = 16 * 1024

_log = logging.getLogger("lighthouse")


class Server(uvicorn.Server):
    """Says where it listens once it does, and lets go of its long polls before it ends."""

    def __init__(self, service: Service, config: uvicorn.Config, named: Path, url: str) -> None:
        super().__init__(config)
        self._service = service
        self._named = named
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then write `named`."""
        await super().startup(sockets)
        part = self._named.with_name(f".{self._named.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"pid": os.getpid(), "url": self._url}) + "\n")
        part.replace(self._named)
        state = self._service.state
        _log.info("listens on %s; term %d, epoch %d", self._url, state.term, state.epoch)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what is open, then end."""
        self._service.close()
        await super().shutdown(sockets)


def policy(config: Config) -> Policy:
    """What the operator chose, as the decisions want it."""
    quorum = config.quorum
    return Policy(
        total=config.replicas,
        steps=config.train.steps,
        min_replicas=quorum.min_replicas,
        suspect_grace_s=quorum.suspect_grace_s,
        evict_s=quorum.evict_s,
        start_wait_s=quorum.start_wait_s,
        final_wait_s=quorum.final_wait_s,
        return_wait_s=quorum.return_wait_s,
        on_lost_head=quorum.on_lost_head,
    )


def read_token(run: Path) -> str:
    """The job's token: RUNDIR/token, else FT_HSDP_TOKEN, else none (""). Raises ConfigError."""
    file = run / "token"
    try:
        token = file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError("token", str(file), f"a file of 64 hex digits ({error})") from None
    if not token:
        raise ConfigError("token", str(file), "a file of 64 hex digits (it is empty)")
    return token


def listen(host: str, port: int, token: str) -> socket.socket:
    """A listening socket. Raises ConfigError on network.host or network.port."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            "network.host", host, f"an address of this machine ({error.strerror or error})"
        ) from None
    if not token and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise ConfigError("network.host", host, "127.0.0.1 or ::1, unless the run has a token")
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            why = "0 or a free port (another process has this one)"
            raise ConfigError("network.port", port, why) from None
        if error.errno == errno.EACCES:
            raise ConfigError("network.port", port, "0 or a port that this user may listen on") from None
        raise ConfigError("network.host", host, f"an address of this machine ({error.strerror})") from None
    return sock


def url(sock: socket.socket) -> str:
    """Where processes of this machine reach `sock`."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(str(host).partition("%")[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://{address}:{port}" if address.version == 4 else f"http://[{address}]:{port}"


def serve(run: Path, port: int | None) -> None:
    """Serve the job in `run` until SIGTERM. Raises ConfigError for what cannot be used."""
    config = load(run / "config.yaml")
    token = read_token(run)
    store = SqliteStore(run / "lighthouse" / "store.sqlite")
    try:
        sock = listen(config.network.host, config.network.port if port is None else port, token)
        journal = Journal(run / "lighthouse" / "events.jsonl")
        service = Service(
            store.load(policy(config)),
            store,
            token,
            journal,
            name=config.job.name,
            config_hash=config_hash(config),
        )
        service.started()
        server = Server(
            service,
            uvicorn.Config(
                create_app(service, token),
                loop="uvloop",
                http="httptools",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=HEADER_BYTES,
            ),
            run / "lighthouse.json",
            url(sock),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            # uvicorn raises the signal again at its end: then, too, it means no more than to end.
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        server.run(sockets=[sock])
    finally:
        store.close()


class _Arguments(argparse.ArgumentParser):
    """A parser whose errors are one line with exit code 64."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        raise ConfigError("arguments", " ".join(sys.argv[1:]), f"--run RUNDIR [--port N] ({message})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and serve; the exit code. What goes wrong is one line on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    parser = _Arguments(prog="python -m lighthouse", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run directory")
    parser.add_argument("--port", type=int, help="instead of network.port")
    try:
        chosen = parser.parse_args(arguments)
        if chosen.port is not None and not 0 <= chosen.port <= 65535:
            raise ConfigError("network.port", chosen.port, "0 to 65535")
        serve(chosen.run, chosen.port)
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
