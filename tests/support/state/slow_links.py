"""Links of limited speed between state servers and their readers, on one machine: `ThrottledLinks`.

Over loopback nothing limits a sender but the processor, which all hosts of a bench share. Here each server is
reached through a forwarding port of its own, and what all connections of that port carry to the readers leaves one
after the other, at the speed of one link. What readers send is not limited: it is a few requests.

It needs no rights and works on every machine, unlike the kernel's traffic control (`benchmarks.namespaces`).
"""

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Self

from ft_hsdp import address

PART = 16 << 10  # bytes that leave at once
LIMIT_S = 10.0  # longest time until the ports listen, or are closed


class ThrottledLinks:
    """A context: on entry there is a port for each server, on exit nothing is left of them.

    Args:
        servers: "host:port" of each server, on this machine.
        bytes_per_s: Of each link, from the server to its readers.

    Attributes:
        addresses: "host:port" of the forwarding ports, in the order of the servers.
        carried: Bytes that each link has carried to readers, with handshakes and heads of HTTP.
    """

    def __init__(self, servers: Sequence[str], bytes_per_s: float) -> None:
        self.addresses: list[str] = []
        self.carried = [0] * len(servers)
        self._servers = servers
        self._bytes_per_s = bytes_per_s
        self._free = [0.0] * len(servers)  # when each link will have sent what it has, on the loop's clock
        self._listening: list[asyncio.Server] = []
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        for link in range(len(self._servers)):
            server = await asyncio.start_server(partial(self._serve, link), "127.0.0.1", 0, limit=PART)
            self._listening.append(server)
            self.addresses.append(address.join("127.0.0.1", server.sockets[0].getsockname()[1]))

    async def _close(self) -> None:
        for server in self._listening:
            server.close()
        for end in self._ends:
            end.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, link: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._ends.add(writer)
        try:
            host, port = address.split(self._servers[link])
            there, back = await asyncio.open_connection(host, port, limit=PART)
            ends.append(back)
            self._ends.add(back)
            await asyncio.gather(self._copy(reader, back), self._send(link, there, writer))
        except (OSError, asyncio.CancelledError):  # one end is gone, or the bench is over
            pass
        finally:
            self._ends.difference_update(ends)
            for end in ends:
                end.transport.abort()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PART):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def _send(self, link: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send what comes when the link is free; connections that share it take turns."""
        while data := await reader.read(PART):
            now = self._loop.time()
            self._free[link] = max(now, self._free[link]) + len(data) / self._bytes_per_s
            self.carried[link] += len(data)
            await asyncio.sleep(self._free[link] - now)
            writer.write(data)
            await writer.drain()
        writer.close()
