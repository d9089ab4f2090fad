"""A contender for tests: a ring of sockets, a whole tensor a hop, and faults on demand."""

import os
import signal
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.allreduce import WorkerSpec
from benchmarks.allreduce_ranks import AllReduceRank

CONNECT_S = 10.0
PIECE = 1 << 16


class StandIn(AllReduceRank):
    """The option ``fault`` says what member 1 does in an all-reduce.

    Faults: "wrong" (one element of its sum), "dies", "fails" (an error that nobody expects).
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._fault = spec.options.get("fault", "") if spec.member == 1 else ""
        self._member = spec.member
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(CONNECT_S)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._edges: list[socket.socket] = []
        self._members = 1

    def join(self, ring: Sequence[tuple[int, str]]) -> None:
        host, _, port = ring[(self._member + 1) % len(ring)][1].rpartition(":")
        right = socket.create_connection((host, int(port)), CONNECT_S)
        right.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        left, _ = self._listener.accept()
        left.settimeout(CONNECT_S)
        self._edges, self._members = [left, right], len(ring)

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        if self._fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "fails":
            raise ZeroDivisionError("on\ndemand")
        passing = source
        sink.copy_(source)
        for _ in range(self._members - 1):
            passing = self._hop(passing)
            sink += passing
        if self._fault == "wrong":
            sink[5] += 1

    def _hop(self, tensor: Tensor) -> Tensor:
        """Give a tensor to the right, take one from the left, a piece at a time so that no buffer overflows."""
        (left, right), arrived = self._edges, torch.empty_like(tensor)
        out, into = tensor.numpy().data.cast("B"), arrived.numpy().data.cast("B")
        for at in range(0, len(out), PIECE):
            right.sendall(out[at : at + PIECE])
            piece = into[at : at + PIECE]
            while piece:  # a socket with a timeout may give less, whatever MSG_WAITALL says
                piece = piece[left.recv_into(piece) :]
        return arrived
