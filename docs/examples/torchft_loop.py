"""One replica of a loop of torchft's Manager, with ProcessGroupFTAR as its process group (docs/torchft.md).

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python docs/examples/torchft_loop.py 0
    TORCHFT_LIGHTHOUSE=http://localhost:29510 python docs/examples/torchft_loop.py 1

Kill either one, start it again: the other one goes on, and the new one catches up.
"""

import argparse
import hashlib
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, Optimizer

from ft_hsdp.compat.torchft import ProcessGroupFTAR


def main() -> None:
    """Train until the last step."""
    parser = argparse.ArgumentParser(description="one replica of a loop of torchft's Manager")
    parser.add_argument("replica", type=int, help="number of the replica")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that a step takes besides")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    group = ProcessGroupFTAR(timeout=timedelta(seconds=10))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        replica_id=f"replica_{args.replica}",
        hostname="localhost",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    optim = Optimizer(manager, adam)
    while manager.current_step() < args.steps:
        torch.manual_seed(1000 * args.replica + manager.current_step())
        x = torch.randn(32, 16)
        optim.zero_grad()  # asks for the quorum
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]:
            work.wait()
        before = manager.current_step()
        optim.step()  # votes
        time.sleep(args.pause)
        if manager.current_step() > before:
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            replicas = manager.num_participants()
            line = f"step {manager.current_step()} replicas {replicas} loss {loss:.4f} {digest[:16]}"
            print(line, flush=True)  # noqa: T201
    manager.shutdown()
    group.shutdown()


if __name__ == "__main__":
    main()
