"""Some steps of examples/accelerate, and what Accelerate's ways to save a model make of it.

The argument is the folder of what is saved.
"""

import runpy
import sys
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.nn import functional
from torch.utils.data import DataLoader

from ft_hsdp.integrations.accelerate import FtHsdpAccelerator

PLAIN = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "accelerate" / "plain.py"))


def main() -> None:
    """Train an epoch of few rows, and save the model on every replica."""
    folder = Path(sys.argv[1])
    accelerator = FtHsdpAccelerator(cpu=True)
    set_seed(0)
    model = PLAIN["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.utils.data.Subset(PLAIN["Counts"](), range(64))
    loader = accelerator.prepare_train_loader(DataLoader(rows, batch_size=8))
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in loader.epochs(1):
        for numbers in loader:
            loss = functional.cross_entropy(model(numbers[:, :-1]), numbers[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss}, step=9)  # no committed step
    accelerator.log({"late": 1.0})  # after the end of the job
    accelerator.save_model(model, folder / "model")
    accelerator.save_model(model, folder / "shards", max_shard_size="20KB")
    weights = accelerator.get_state_dict(model)
    accelerator.save(weights, folder / "weights.pt")
    assert bool(weights) == accelerator.is_main_process


if __name__ == "__main__":
    main()
