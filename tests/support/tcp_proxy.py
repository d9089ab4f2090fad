"""A TCP proxy on a thread of its own, which can be cut: connections end, new ones are refused; and mended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class Proxy:
    """Forwards a port of its own to ``port``, both on 127.0.0.1; a context that leaves nothing open.

    ``passed``: all that went through it, both ways. ``spoil``: what it makes of each piece before it passes it on.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self.passed = bytearray()
        self.spoil: Callable[[bytes], bytes] = bytes
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        self._call(self._cut())

    def mend(self) -> None:
        """Forward again, at the same port."""
        self._call(self._listen())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for end in list(self._ends):
            end.transport.abort()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            self._ends.discard(writer)
            writer.transport.abort()
            return
        self._ends.add(back)
        try:
            await asyncio.gather(self._copy(reader, back), self._copy(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._ends -= {writer, back}
            for end in (writer, back):
                end.transport.abort()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await end.wait_closed()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.passed += data
            writer.write(self.spoil(data))
            await writer.drain()
        writer.close()
