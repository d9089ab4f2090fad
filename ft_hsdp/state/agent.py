"""``python -m ft_hsdp.state.agent --replica R --host H``: the state agent of one replica on this host.

It owns the memory that the replica's ranks write their snapshots into, gives it to the ranks that come after them
and serves it to other replicas (FT-HSDP §4.4). The death of the trainers does not touch it. It prints a JSON line
{"pid", "address"} once it listens. The job's token is taken from FT_HSDP_TOKEN.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from ft_hsdp import handshake, sealed
from ft_hsdp.errors import EXIT_OK, ConfigError, FtHsdpError
from ft_hsdp.state import messages
from ft_hsdp.state.door import Door, listen
from ft_hsdp.state.holdings import Holdings
from ft_hsdp.state.server import StateServer
from ft_hsdp.state.start import TOKEN_VARIABLE

LINGER_S = 60.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def watching(guard: int | None, ended: Callable[[], object]) -> Iterator[None]:
    """Call ``ended`` on the running loop when the process ``guard`` has ended."""
    if guard is None:
        yield
        return
    try:
        process = os.pidfd_open(guard)
    except ProcessLookupError:
        ended()
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(process, ended)
    try:
        yield
    finally:
        loop.remove_reader(process)
        os.close(process)


async def serve(door: Door, linger_s: float, guard: int | None, ready: dict[str, object]) -> None:
    """Say on stdout that it is ready, and serve until SIGTERM, the end of the process ``guard``, or until no rank
    was here for ``linger_s``."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    with watching(guard, told.set):
        await _serve(door, linger_s, told, ready)


async def _serve(door: Door, linger_s: float, told: asyncio.Event, ready: dict[str, object]) -> None:
    serving = asyncio.create_task(door.serve())
    ends = {asyncio.create_task(told.wait()), asyncio.create_task(door.deserted(linger_s))}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    done, _ = await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
    if serving not in done:
        _log.info("ends: %s", "told to" if told.is_set() else f"no rank was here for {linger_s:g} s")
        for task in (serving, *ends):
            task.cancel()
        await asyncio.wait({serving, *ends})
    if not serving.cancelled():
        serving.result()


def run(
    token: str, replica: int, host: str, port: int, linger_s: float, guard: int | None, generation: int = 0
) -> None:
    """Be the agent.

    Raises:
        ConfigError: ``host`` or ``port`` cannot be used.
        Retryable: there is another agent of that replica here.
    """
    with listen(token, replica, generation) as sock:
        holdings = Holdings()
        try:
            server = StateServer(host, port, holdings, token)
        except OSError as error:
            raise ConfigError(
                "--host, --port", f"{host}:{port}", f"a free address here ({error.strerror})"
            ) from None
        try:
            door = Door(sock, token, holdings, server.address)
            ready = {"pid": os.getpid(), "address": server.address}
            asyncio.run(serve(door, linger_s, guard, ready))
        finally:
            server.close()
            holdings.close()


class _Arguments(argparse.ArgumentParser):
    """A parser whose errors are one line with exit code 64."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage."""
        allowed = f"--replica R --host H [--port P] [--linger SECONDS] [--guard PID] ({message})"
        raise ConfigError("arguments", " ".join(sys.argv[1:]), allowed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments and serve; the exit code. What goes wrong is one line on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    parser = _Arguments(prog="python -m ft_hsdp.state.agent", description=__doc__)
    parser.add_argument("--replica", type=int, required=True, help="whose ranks' snapshots it keeps")
    parser.add_argument("--host", required=True, help="address to serve snapshots at")
    parser.add_argument("--port", type=int, default=0, help="port to serve snapshots at; 0: any")
    parser.add_argument("--linger", type=float, default=LINGER_S, help="end when no rank was here for so many s")
    generations = range(messages.GENERATIONS)
    parser.add_argument("--generation", type=int, default=0, choices=generations, help="the number of its name")
    parser.add_argument("--tls", choices=("auto", "on", "off"), default="auto", help="as network.tls")
    parser.add_argument("--hello", type=float, default=handshake.HELLO_S, help="as timeouts.hello_s")
    parser.add_argument("--guard", type=int, help="end when the process with this id does")
    try:
        chosen = parser.parse_args(arguments)
        token = os.environ.pop(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ConfigError(TOKEN_VARIABLE, token, "the job's token")
        if chosen.replica < 0:
            raise ConfigError("--replica", chosen.replica, "0 or more")
        if not 0 <= chosen.port <= 65535:
            raise ConfigError("--port", chosen.port, "0 to 65535")
        if not 0 < chosen.linger < float("inf"):
            raise ConfigError("--linger", chosen.linger, "seconds, above 0")
        if not 0 < chosen.hello < float("inf"):
            raise ConfigError("--hello", chosen.hello, "seconds, above 0")
        sealed.use(chosen.tls)
        handshake.use(chosen.hello)
        run(token, chosen.replica, chosen.host, chosen.port, chosen.linger, chosen.guard, chosen.generation)
    except FtHsdpError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
