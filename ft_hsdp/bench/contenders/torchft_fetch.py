"""Checkpoint transports of torchft's kind: a state dict goes in on one side and comes out on the other.

torchft's HTTPTransport: the nearest peer's way to heal a replica.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torchft.checkpointing.http_transport import HTTPTransport

from ft_hsdp.bench.contenders.fetch import TIMEOUT_S, DonorContender, FetchSeat, ReceiverContender, digest
from ft_hsdp.compat.torchft import StateTransport

STEP = 1
TIMEOUT = timedelta(seconds=TIMEOUT_S)


def state_dict(seat: FetchSeat) -> dict[str, torch.Tensor]:
    """The state as fp32 tensors."""
    content = torch.from_numpy(seat.content())
    return {f"{i}": part.view(torch.float32) for i, part in enumerate(content.split(seat.nbytes))}


class TransportDonor(DonorContender):
    """Offers the state by a transport."""

    def __init__(self, transport: Any, seat: FetchSeat) -> None:
        self._transport = transport
        self._transport.send_checkpoint([1], STEP, state_dict(seat), TIMEOUT)
        self.where = self._transport.metadata()


class TransportReceiver(ReceiverContender):
    """Receives the state by a transport."""

    def __init__(self, transport: Any, where: str) -> None:
        self._transport = transport
        self._where = where
        self._got: dict[str, torch.Tensor] = {}

    def take(self) -> None:
        """All tensors are there."""
        self._got = self._transport.recv_checkpoint(0, self._where, STEP, TIMEOUT)

    def drop(self) -> str:
        """Return the digest of the tensors, and drop them."""
        got, self._got = self._got, {}
        return digest(got[f"{i}"].view(torch.uint8).numpy() for i in range(len(got)))


class StateDonor(TransportDonor):
    """Serves with ft_hsdp's `StateTransport`."""

    def __init__(self, seat: FetchSeat) -> None:
        super().__init__(StateTransport(host="127.0.0.1"), seat)


class StateReceiver(TransportReceiver):
    """Receives with ft_hsdp's `StateTransport`."""

    def __init__(self, seat: FetchSeat, where: str) -> None:
        super().__init__(StateTransport(host="127.0.0.1"), where)


class HTTPDonor(TransportDonor):
    """Offers the state in `seat.chunks` chunks; 0: in one piece."""

    def __init__(self, seat: FetchSeat) -> None:
        super().__init__(HTTPTransport(TIMEOUT, seat.chunks), seat)


class HTTPReceiver(TransportReceiver):
    """Receives it on the loopback interface, whatever the host's name leads to."""

    def __init__(self, seat: FetchSeat, where: str) -> None:
        port = where.split(":")[2].split("/")[0]
        super().__init__(HTTPTransport(TIMEOUT, seat.chunks), f"http://127.0.0.1:{port}/checkpoint/")
