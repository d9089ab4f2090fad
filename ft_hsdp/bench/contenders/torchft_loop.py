"""One replica of a loop of torchft's Manager, until it is killed.

    python -m ft_hsdp.bench.contenders.torchft_loop SPEC

A line once everything is imported: {"t": 1.5, "incarnation": "0"}, t in Unix seconds; and one for each committed
step, with "step" and "participants".
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, Optimizer
from torchft.process_group import ProcessGroupGloo

from ft_hsdp.bench import trainee
from ft_hsdp.bench.recovery.setup import RecoverySetup
from ft_hsdp.jsonl import LineWriter
from ft_hsdp.lifetime import die_with


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """Which replica this is."""

    replica: int
    incarnation: str  # how often it was started before
    setup: Mapping[str, Any]  # what it trains
    file: str  # for its lines
    lighthouse: str  # URL
    timeout_s: float  # of the process group and the manager
    parent: int  # the pid with which it dies


def train(spec: LoopSpec) -> None:
    """Train as torchft's own example does, with each gradient all-reduced by hand."""
    lines, life = LineWriter(Path(spec.file)), {"incarnation": spec.incarnation}
    lines.write({"t": time.time(), **life})
    torch.set_num_threads(1)
    setup = RecoverySetup(**spec.setup)
    model, data = trainee.make_model(setup), trainee.make_data(setup)
    adam = torch.optim.AdamW(model.parameters())

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=spec.timeout_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        timeout=timeout,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica_{spec.replica}",
        lighthouse_addr=spec.lighthouse,
        hostname="127.0.0.1",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    optim = Optimizer(manager, adam)
    model(data.batch(0, 0, 0)).backward()  # warm, as ours are before they check in
    while True:
        optim.zero_grad()  # asks for the quorum
        model(data.batch(spec.replica, manager.current_step(), 0)).backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]:
            work.wait()
        before = manager.current_step()
        optim.step()  # votes
        if manager.current_step() > before:
            now = {"t": time.time(), "step": manager.current_step(), "participants": manager.num_participants()}
            lines.write({**now, **life})


if __name__ == "__main__":
    loop = LoopSpec(**json.loads(sys.argv[1]))
    die_with(loop.parent)
    train(loop)
