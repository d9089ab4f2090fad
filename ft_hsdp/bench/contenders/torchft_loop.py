"""One replica of a loop of torchft's Manager, until it is killed.

    python -m ft_hsdp.bench.contenders.torchft_loop SEAT

A line for each committed step: {"t": 1.5, "step": 7, "participants": 4}, t in Unix seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer
from torchft.process_group import ProcessGroupGloo

from ft_hsdp.bench.waiting import Nothing, Waiting
from ft_hsdp.events import Lines

TIMEOUT_S = 60.0  # of the process group and the manager: their default


@dataclass(frozen=True, slots=True)
class Seat:
    """Which replica; layers, elements, wait_s: see `Waiting`; file: for its lines; lighthouse: URL."""

    replica: int
    layers: int
    elements: int
    wait_s: float
    file: str
    lighthouse: str


def train(seat: Seat) -> None:
    """As torchft's own example does it, with each gradient all-reduced by hand."""
    torch.set_num_threads(1)
    model = Waiting(seat.layers, seat.elements, seat.wait_s)
    adam = torch.optim.AdamW(model.parameters())
    data = Nothing()

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=TIMEOUT_S)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica_{seat.replica}",
        lighthouse_addr=seat.lighthouse,
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    optim = Optimizer(manager, adam)
    lines = Lines(Path(seat.file))
    model(None).backward()  # warm, as ours are before they check in
    while True:
        optim.zero_grad()  # asks for the quorum
        model(data.batch(seat.replica, manager.current_step(), 0)).backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]:
            work.wait()
        before = manager.current_step()
        optim.step()  # votes
        if manager.current_step() > before:
            now = {"t": time.time(), "step": manager.current_step(), "participants": manager.num_participants()}
            lines.write(now)


def main(argv: Sequence[str]) -> None:
    """Train until the end."""
    train(Seat(**json.loads(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
