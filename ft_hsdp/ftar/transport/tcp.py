"""TCP transport: K connections of its own for each edge, with the congestion control that suits the link."""

from __future__ import annotations

import asyncio
import socket

from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.ftar import control, door
from ft_hsdp.ftar.door import Call, Door
from ft_hsdp.ftar.memory import Arena
from ft_hsdp.ftar.transport.carrier import Bytes
from ft_hsdp.ftar.transport.inlet import StreamInlet
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.outlet import StreamOutlet
from ft_hsdp.protocol import RingReady


class Tcp:
    """Works everywhere."""

    def offer(self, door: Door, host: str) -> str:
        """The caller knows the address already."""
        return ""

    async def dial(self, edge: Edge, arena: Arena) -> StreamOutlet:
        """One connection after the other."""
        socks: list[socket.socket] = []
        host, _, port = edge.address.rpartition(":")
        try:
            for lane in range(edge.settings.connections):
                socks.append(sock := socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
                control.tune(sock, edge.settings.timeout_s)
                await control.send(sock, door.data(edge.token, edge.ticket, lane))
                if not isinstance(await control.receive(sock, RingReady), RingReady):
                    raise ConnectionResetError("the data connection was refused")
        except BaseException:
            _close(socks)
            raise
        socks = [control.blocking(s, edge.settings.timeout_s) for s in socks]
        return StreamOutlet(socks, edge.settings.slots, edge.member, Bytes(), f"ftar-tx-{edge.member}")

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> StreamInlet:
        """One connection after the other."""
        socks: list[socket.socket] = []
        try:
            for lane in range(edge.settings.connections):
                call, sock = await calls.get()
                socks.append(sock)
                if call.lane != lane:
                    raise ProtocolViolation(f"data connection {call.lane} came as number {lane}")
                control.tune(sock, edge.settings.timeout_s)
                await control.send(sock, RingReady())
        except BaseException:
            _close(socks)
            raise
        socks = [control.blocking(s, edge.settings.timeout_s) for s in socks]
        settings = edge.settings
        name = f"ftar-rx-{edge.member}"
        return StreamInlet(socks, settings.slots, edge.member, Bytes(), name, settings.threaded)


def _close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()
