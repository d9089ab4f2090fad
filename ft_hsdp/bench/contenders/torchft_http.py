"""torchft's HTTPTransport: the nearest peer's way to heal a replica."""

from __future__ import annotations

from torchft.checkpointing.http_transport import HTTPTransport

from ft_hsdp.bench.fetch.seat import Seat
from ft_hsdp.bench.fetch.torchft_transports import TIMEOUT, TransportDonor, TransportReceiver


class HTTPDonor(TransportDonor):
    """Offers the state in `seat.chunks` chunks; 0: in one piece."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(HTTPTransport(TIMEOUT, seat.chunks), seat)


class HTTPReceiver(TransportReceiver):
    """Receives it on the loopback interface, whatever the host's name leads to."""

    def __init__(self, seat: Seat, where: str) -> None:
        port = where.split(":")[2].split("/")[0]
        super().__init__(HTTPTransport(TIMEOUT, seat.chunks), f"http://127.0.0.1:{port}/checkpoint/")
