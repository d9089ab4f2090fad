"""A proxy in front of the address of a member that can do to connections what networks do: cut, stall, delay,
half-close, flip a bit. All proxies of a storm share one thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable

from ft_hsdp.ftar.frame import ENTRY_BYTES, HEADER
from ft_hsdp.handshake import ANSWER_BYTES, MAGIC, Purpose
from ft_hsdp.protocol import LENGTH

PART = 1 << 16
FAULTS = ("cut", "stall", "half", "delay", "flip", "flip")


class Headers:
    """Finds the headers of a data connection's frames in its bytes; ``inline``: their payloads are there too."""

    def __init__(self, members: int, inline: bool) -> None:
        self.members = members
        self._inline = inline
        self._need = LENGTH.size
        self._kind = "length"
        self._seen = bytearray()
        self._skip = ANSWER_BYTES  # the handshake comes before the first message

    def feed(self, data: bytes) -> int | None:
        """The offset in ``data`` of a byte of a header, if there is one."""
        found, at = None, 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = min(self._need - len(self._seen), len(data) - at)
            if self._kind == "header" and found is None:
                found = at + random.randrange(step)
            self._seen += data[at : at + step]
            at += step
            if len(self._seen) == self._need:
                self._next(bytes(self._seen))
                self._seen.clear()
        return found

    def _next(self, whole: bytes) -> None:
        if self._kind == "length":
            (self._skip,) = LENGTH.unpack(whole)
            self._kind, self._need = "header", HEADER.size
            return
        _, _, _, _, _, number, _, _, round_, nbytes, _ = HEADER.unpack(whole)
        entries = number if round_ == 0 and number < self.members else 0
        self._skip = entries * ENTRY_BYTES + (nbytes if self._inline else 0)


class Pair:
    """One proxied connection: two sockets and two pumps."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self._proxy = proxy
        self.socks = (near, far)
        self.kind = ""
        self._open = asyncio.Event()
        self._open.set()
        self._flip = False
        self._headers = Headers(proxy.members, proxy.inline)
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
                await loop.sock_sendall(sink, self._passed(data, forward))
            sink.shutdown(socket.SHUT_WR)
            return
        for sock in self.socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _passed(self, data: bytes, forward: bool) -> bytes:
        at: int | None = random.randrange(len(data))
        if not self.kind:
            return data
        if self.kind == "data" and forward:
            self._headers.members = self._proxy.members
            at = self._headers.feed(data)
        if not self._flip or at is None or (self.kind == "data" and not forward):
            return data
        self._flip = False
        self._proxy.flipped += 1
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << random.randrange(8)
        return bytes(spoilt)

    def hurt(self, fault: str, delay_s: float) -> None:
        if fault == "cut":
            for sock in self.socks:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.end()
        elif fault == "half":
            with contextlib.suppress(OSError):
                random.choice(self.socks).shutdown(socket.SHUT_WR)
        elif fault == "flip":
            self._flip = True
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

    def __init__(self, target: str, inline: bool) -> None:
        self.inline = inline
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._listener = socket.create_server((self._host, 0))
        self._listener.setblocking(False)
        self.address = f"{self._host}:{self._listener.getsockname()[1]}"
        self.members = 0
        self.flipped = 0
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
        self.flipped = 0

    def add(self, target: str, inline: bool) -> Proxy:
        proxy: Proxy = self.call(lambda: Proxy(target, inline))
        self._all.append(proxy)
        return proxy

    def drop(self, proxy: Proxy) -> None:
        self._all.remove(proxy)
        self.flipped += proxy.flipped
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
