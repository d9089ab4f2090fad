"""A proxy in front of the address of a member that can do to connections what networks do: cut, stall, delay,
half-close. All proxies of a storm share one thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable

from ft_hsdp.handshake import MAGIC, Purpose

PART = 1 << 16
FAULTS = ("cut", "stall", "half", "delay")


class Pair:
    """One proxied connection: two sockets and two pumps."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.socks = (near, far)
        self.kind = ""
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
            while data := await loop.sock_recv(source, PART):
                if forward and not self.kind:
                    self.kind = "data" if data[len(MAGIC)] == Purpose.DATA else "control"
                await self._open.wait()
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
    """In front of one member; ``address`` is what the others are told."""

    def __init__(self, target: str) -> None:
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
            self._pairs.append(Pair(near, far))
            if self._later:
                self._pairs[-1].hurt(self._later, 0.0)

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
    """The thread of all proxies; every call is made on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies", daemon=True)
        self._thread.start()
        self._all: list[Proxy] = []

    def add(self, target: str) -> Proxy:
        proxy: Proxy = self.call(lambda: Proxy(target))
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
