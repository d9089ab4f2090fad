"""torchft as the nearest peer: its process group, its checkpoint transport, and its lighthouse.

`python -m benchmarks.torchft FILE [HEARTBEAT_MS JOIN_MS [MEMBERS]]` serves its lighthouse, and writes the URL
to FILE. Without times it has those of torchft's own command. MEMBERS is the fewest that make a quorum (1). Its
training loop is in `training`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

from benchmarks.allreduce import WorkerSpec
from benchmarks.allreduce_ranks import TIMEOUT_S, StoreRank
from benchmarks.processes import LOOPBACK
from benchmarks.state_fetch import FETCH_S, FetchSpec, ReceiverContender, digest
from ft_hsdp.jsonl import replace_json

STEP = 1
FETCH_TIMEOUT = timedelta(seconds=FETCH_S)


class TorchFT(StoreRank):
    """`ProcessGroupGloo.allreduce`, configured as torchft's Manager does it."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._group = ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S))

    def join(self, ring: Sequence[tuple[int, str]]) -> None:
        """Configure with a prefix of the store."""
        member = self.spec.member
        self._group.configure(f"{dict(ring)[0]}/1", f"replica_{member}", member, len(ring))

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        """Sum ``sink`` in place over the ranks."""
        self._group.allreduce([sink], ReduceOp.SUM).wait()


class HTTPDonor:
    """Offers the state, as fp32 tensors, by torchft's HTTPTransport in ``spec.chunks`` chunks; 0: in one piece."""

    def __init__(self, spec: FetchSpec) -> None:
        content = torch.from_numpy(spec.content())
        state = {f"{i}": part.view(torch.float32) for i, part in enumerate(content.split(spec.nbytes))}
        self._transport = HTTPTransport(FETCH_TIMEOUT, spec.chunks)
        self._transport.send_checkpoint([1], STEP, state, FETCH_TIMEOUT)
        self.where = self._transport.metadata()


class HTTPReceiver(ReceiverContender):
    """Receives it on the loopback interface, whatever the host's name leads to."""

    def __init__(self, spec: FetchSpec, where: str) -> None:
        port = where.split(":")[2].split("/")[0]
        self._transport = HTTPTransport(FETCH_TIMEOUT, spec.chunks)
        self._where = f"http://{LOOPBACK}:{port}/checkpoint/"
        self._got: dict[str, Tensor] = {}

    def take(self) -> None:
        """Receive the tensors of the state."""
        self._got = self._transport.recv_checkpoint(0, self._where, STEP, FETCH_TIMEOUT)

    def drop(self) -> str:
        """Forget the tensors; return their digest."""
        got, self._got = self._got, {}
        return digest(got[f"{i}"].view(torch.uint8).numpy() for i in range(len(got)))


def lighthouse(file: str, *numbers: str) -> None:
    """Serve the lighthouse until killed."""
    names = ("heartbeat_timeout_ms", "join_timeout_ms", "min_replicas")
    given = dict(zip(names, map(int, numbers), strict=False))
    server = LighthouseServer(bind=f"{LOOPBACK}:0", **{"min_replicas": 1, **given})
    replace_json(Path(file), {"url": server.address()})
    signal.pause()


if __name__ == "__main__":
    lighthouse(*sys.argv[1:])
