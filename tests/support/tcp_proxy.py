"""TCP proxies in front of addresses that do what networks do: cut, stall, delay, half-close, or be slow."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

from ft_hsdp.handshake import MAGIC, Purpose

PART, SLOW_PART = 1 << 16, 1 << 14
FAULTS = ("cut", "stall", "half", "delay")


class Pair:
    """One proxied connection: two sockets and two pumps."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self.socks = (near, far)
        self.kind = ""
        self._proxy = proxy
        self._open = asyncio.Event()
        self._open.set()
        loop = asyncio.get_running_loop()
        self._pumps = [
            loop.create_task(self._pump(near, far, True)),
            loop.create_task(self._pump(far, near, False)),
        ]

    async def _pump(self, source: socket.socket, sink: socket.socket, forward: bool) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, self._proxy.part):
                if forward and not self.kind:
                    self.kind = "data" if data[len(MAGIC)] == Purpose.DATA else "control"
                await self._open.wait()
                await self._proxy.carry(data, forward)
                await loop.sock_sendall(sink, data)
            sink.shutdown(socket.SHUT_WR)
            return
        for sock in self.socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def hurt(self, fault: str, delay_s: float) -> None:
        if fault == "cut":
            for sock in self.socks:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.end()
        elif fault == "half":
            with contextlib.suppress(OSError):
                random.choice(self.socks).shutdown(socket.SHUT_WR)
        else:
            self._open.clear()
            if fault == "delay":
                asyncio.get_running_loop().call_later(delay_s, self._open.set)

    def end(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        for sock in self.socks:
            sock.close()

    @property
    def over(self) -> bool:
        """Whether both ways have ended."""
        return all(p.done() for p in self._pumps)


class Proxy:
    """In front of one listener; ``address`` is what the others are told.

    ``tapped`` has all that went through it, both ways, if it is to be kept. What comes back over all connections
    together gets ``bytes_per_s``.
    """

    def __init__(self, target: str, bytes_per_s: float = math.inf, keep: bool = False) -> None:
        self.part = PART if math.isinf(bytes_per_s) else SLOW_PART
        self.tapped = bytearray()
        self._bytes_per_s, self._keep = bytes_per_s, keep
        self._free = 0.0  # when the link will have sent what it has, on the loop's clock
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._listener = socket.create_server((self._host, 0))
        self._listener.setblocking(False)
        self.address = f"{self._host}:{self._listener.getsockname()[1]}"
        self._pairs: list[Pair] = []
        self._later = ""
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            far = socket.socket()
            for sock in (near, far):
                sock.setblocking(False)
            try:
                await loop.sock_connect(far, (self._host, self._port))
            except OSError:
                near.close()
                far.close()
                continue
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sweep()
            self._pairs.append(Pair(self, near, far))
            if self._later:
                self._pairs[-1].hurt(self._later, 0.0)

    async def carry(self, data: bytes, forward: bool) -> None:
        """Take the time that these bytes take on the link."""
        if self._keep:
            self.tapped += data
        if not forward and self.part == SLOW_PART:
            now = asyncio.get_running_loop().time()
            self._free = max(now, self._free) + len(data) / self._bytes_per_s
            await asyncio.sleep(self._free - now)

    def _sweep(self) -> None:
        for pair in [p for p in self._pairs if p.over]:
            self._pairs.remove(pair)
            pair.end()

    def hurt(self, fault: str, which: str, delay_s: float) -> int:
        """Do ``fault`` to the connections of a kind ("control", "data" or ""); how many there were."""
        self._sweep()
        pairs = [p for p in self._pairs if which in ("", p.kind)]
        for pair in pairs:
            pair.hurt(fault, delay_s)
        return len(pairs)

    def later(self, fault: str) -> None:
        """Do ``fault`` to every connection to come ("": stop that)."""
        self._later = fault

    def heal(self) -> None:
        """Close what was stalled; what comes next goes through."""
        self._later = ""
        for pair in self._pairs:
            pair.end()
        self._pairs.clear()

    def close(self) -> None:
        self._serving.cancel()
        self._listener.close()
        self.heal()


class Proxies:
    """The thread of some proxies, on which every call is made; a context that leaves nothing open."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._all: list[Proxy] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, target: str, bytes_per_s: float = math.inf, keep: bool = False) -> Proxy:
        proxy: Proxy = self.call(lambda: Proxy(target, bytes_per_s, keep))
        self._all.append(proxy)
        return proxy

    def drop(self, proxy: Proxy) -> None:
        self._all.remove(proxy)
        self.call(proxy.close)

    def call(self, what: Callable[[], object]) -> object:
        async def on_loop() -> object:
            return what()

        return asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(10)

    def close(self) -> None:
        for proxy in list(self._all):
            self.drop(proxy)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
