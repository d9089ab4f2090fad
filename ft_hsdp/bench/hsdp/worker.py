"""One rank of a crew: `python -m ft_hsdp.bench.hsdp.worker FD SEAT` trains so many steps as it is told.

    <- {"address": "10.77.0.1", "pid": 1}       before the first step
    -> {"steps": 2, "at": 12.5}                 <- {"t": 13.6}, before the step that comes next

The training loops are ordinary ones, but for the wait before each forward.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ft_hsdp
from ft_hsdp.bench.hsdp.scene import PATIENCE_S, HsdpSeat
from ft_hsdp.bench.waiting import Waiting
from ft_hsdp.config import Config, load
from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE
from ft_hsdp.train.model import Transformer
from ft_hsdp.train.tokens import VOCABULARY
from ft_hsdp.train.trainer import build, build_optimizer

Batch = tuple[Tensor, Tensor]


class Paced:
    """Data, and the wait for the bench before every block of steps."""

    def __init__(self, sock: socket.socket, config: Config, seat: HsdpSeat) -> None:
        self._stream = sock.makefile("rw", encoding="utf-8")
        self._seat = seat
        self._greeted = False
        self._left = 0
        words = VOCABULARY[config.data.tokenizer]
        self._shape = (config.train.micro_batch, config.train.seq_len + 1)
        self._words = words

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Batch:
        """Random tokens, the same for the same place."""
        place = torch.Generator().manual_seed((shard * 1_000_003 + index) * self._seat.ranks + rank)
        tokens = torch.randint(self._words, self._shape, generator=place)
        return tokens[:, :-1], tokens[:, 1:]

    def wait(self) -> None:
        """Before every step: wait where the bench has not ordered it yet. Batches may be made earlier."""
        if self._left == 0:
            self._say(
                {"t": time.monotonic()} if self._greeted else {"address": self._seat.host, "pid": os.getpid()}
            )
            self._greeted = True
            line = self._stream.readline()
            if not line:
                os._exit(EXIT_OK)  # the bench has enough
            order = json.loads(line)
            self._left = order["steps"]
            time.sleep(max(0.0, order["at"] - time.monotonic()))
        self._left -= 1

    def _say(self, answer: dict[str, object]) -> None:
        self._stream.write(json.dumps(answer) + "\n")
        self._stream.flush()


def alone(seat: HsdpSeat, config: Config, data: Paced) -> None:
    """FSDP2 over the ranks of a replica, which knows of no other."""
    _group(seat, seat.host, seat.rank, seat.ranks, "lo")
    _train(config, data, seat, (seat.ranks,))


def hsdp(seat: HsdpSeat, config: Config, data: Paced) -> None:
    """PyTorch's HSDP: FSDP2 on a mesh of replicas and ranks; gradients are all-reduced by gloo."""
    rank, size = seat.replica * seat.ranks + seat.rank, seat.replicas * seat.ranks
    _group(seat, seat.first, rank, size, seat.interface)
    _train(config, data, seat, (seat.replicas, seat.ranks))


def product(seat: HsdpSeat, config: Config, data: Paced) -> None:
    """The whole of ft_hsdp, by its public API."""
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.ranks), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(seat.port)}
    job = ft_hsdp.join(config, seat.replica, Path(seat.run))
    model = job.shard(_model(seat, config))
    optim = job.optimizer(build_optimizer(config, list(model.parameters())))
    for batch in job.batches(data):
        data.wait()
        model(batch).backward()
        optim.step()


CREWS = {"alone": alone, "hsdp": hsdp, "ft_hsdp": product}


def _group(seat: HsdpSeat, store: str, rank: int, size: int, interface: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    meet = f"tcp://{store}:{seat.port}"
    dist.init_process_group("gloo", meet, timedelta(seconds=PATIENCE_S), world_size=size, rank=rank)


def _model(seat: HsdpSeat, config: Config) -> Transformer | Waiting:
    if seat.waiting is None:
        return build(config)
    elements, wait_s = seat.waiting
    return Waiting(config.model.layers, elements, wait_s)


def _train(config: Config, data: Paced, seat: HsdpSeat, shape: tuple[int, ...]) -> None:
    """As anybody would, with the parts that ft_hsdp shards too."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "rank")[-len(shape) :])
    model = _model(seat, config)
    for part in model.shards():
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(config, list(model.parameters()))
    index = 0
    while True:
        data.wait()
        model(data.batch(seat.replica, index, seat.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        index += 1


def main(argv: Sequence[str]) -> int:
    """Train until the bench closes its end."""
    sock, seat = socket.socket(fileno=int(argv[0])), HsdpSeat(**json.loads(argv[1]))
    torch.set_num_threads(1)
    try:
        config = load(Path(seat.config))
        CREWS[seat.crew](seat, config, Paced(sock, config, seat))
    except Exception as error:  # whatever it is, the bench gets it as one line and the log as a traceback
        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            sock.sendall(
                json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())}).encode() + b"\n"
            )
    os._exit(EXIT_RETRYABLE)  # nobody waits for the threads of a group that is broken


if __name__ == "__main__":
    main(sys.argv[1:])
