"""The TCP transport: K data connections for each edge, with the congestion control that suits the link."""

from __future__ import annotations

import asyncio
import socket

from ft_hsdp import handshake, record_layer
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.ftar import connections
from ft_hsdp.ftar.connections import Call, Listener
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.ftar.transport.base import InlineCodec, blocking
from ft_hsdp.ftar.transport.kind import Edge
from ft_hsdp.ftar.transport.receiver import StreamReceiver
from ft_hsdp.ftar.transport.sender import StreamSender
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RingData, RingReady


class Tcp:
    """Makes TCP edges; works between any two hosts."""

    def offer(self, listener: Listener, host: str) -> str:
        """Return nothing: the caller knows the address from the grant."""
        return ""

    async def dial(self, edge: Edge, arena: Arena) -> StreamSender:
        """Open the K connections one after the other; each presents the ticket."""
        socks: list[socket.socket] = []
        with connections.closed_on_error(socks):
            for lane in range(edge.settings.connections):
                socks.append(sock := await handshake.dial(edge.address, edge.token, Purpose.DATA))
                connections.tune(sock, edge.settings.timeout_s)
                await connections.present(sock, RingData(edge.ticket, lane))
            await _ready(socks, edge)
        settings, name = edge.settings, f"ftar-tx-{edge.member}"
        return StreamSender(socks, settings.slots, edge.member, InlineCodec(), name, settings.threaded)

    async def accept(self, edge: Edge, calls: asyncio.Queue[Call]) -> StreamReceiver:
        """Accept the K connections in the order in which the caller opens them."""
        socks: list[socket.socket] = []
        with connections.closed_on_error(socks):
            for lane in range(edge.settings.connections):
                call, sock = await calls.get()
                socks.append(sock)
                if call.lane != lane:
                    raise ProtocolViolation(f"data connection {call.lane} came as number {lane}")
                connections.tune(sock, edge.settings.timeout_s)
                await connections.send(sock, RingReady())
            await _ready(socks, edge)
        settings = edge.settings
        name = f"ftar-rx-{edge.member}"
        return StreamReceiver(socks, settings.slots, edge.member, InlineCodec(), name, settings.threaded)


async def _ready(socks: list[socket.socket], edge: Edge) -> None:
    """Make the connections blocking, and encrypt them where the job asks for it."""
    for sock in socks:
        blocking(sock, edge.settings.timeout_s)
    if any(isinstance(sock, record_layer.Sealed) for sock in socks):
        await asyncio.to_thread(record_layer.agree, socks, edge.ticket.encode())
