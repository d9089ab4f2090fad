"""A TCP proxy on a thread of its own, which can spoil what it passes on, or hold it up as a slow link does."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable


class Proxy:
    """Forwards a port of its own to ``port``, both on 127.0.0.1; a context that leaves nothing open.

    ``passed``: all that went through it, both ways. ``spoil``: what it makes of each piece before it passes it on.
    All connections together get ``bytes_per_s`` of what they ask for.
    """

    def __init__(self, port: int, bytes_per_s: float = math.inf) -> None:
        self._to = port
        self._bytes_per_s = bytes_per_s
        self._free = 0.0  # when the link will have sent what it has, on the loop's clock
        self.port = 0
        self.passed = bytearray()
        self.spoil: Callable[[bytes], bytes] = bytes
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            ends.append(back)
            await asyncio.gather(self._copy(reader, back, math.inf), self._copy(there, writer, self._bytes_per_s))
        except (OSError, asyncio.CancelledError):  # one end is gone, or the test is over
            pass
        finally:
            for end in ends:
                end.transport.abort()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float) -> None:
        while data := await reader.read(16 << 10):
            self.passed += data
            self._free = max(now := self._loop.time(), self._free) + len(data) / bytes_per_s
            await asyncio.sleep(self._free - now)
            writer.write(self.spoil(data))
            await writer.drain()
        writer.close()
