"""A user's loop that does more than train: an average of the weights, an evaluation in a pause, values of its own.

The evaluation of rank 0 of replica 0 takes `EVALUATION_S`, that of the others no time, so they wait for it.
"""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import ft_hsdp
from docs.examples.own_loop import Classifier, Spirals
from tests.compatibility.cases import Average

EVALUATION_S = 2.5
EVERY = 10


def digest(tensors: dict[str, Any]) -> str:
    """The SHA-256 of whole tensors; a collective if they are sharded."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        total.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """Train until the job ends, and write what this rank holds then into the run's directory."""
    job = ft_hsdp.join()
    data = Spirals(job.config.train.micro_batch, job.config.train.seed)
    torch.manual_seed(job.config.train.seed)
    model = job.shard(Classifier())
    optim = job.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    average = Average(model)
    job.register_state("average", average.state_dict, average.load_state_dict)
    job.on_commit(average.update)
    job.warm_up(lambda: model(data.batch(0, 0, job.rank)).backward())
    heard: list[Any] = []
    job.on_commit(lambda step: heard.append(step.step))
    job.on_rejoin(lambda step: heard.append(["rejoined", step]))
    job.on_leave(heard.append)
    for batch in job.batches(data):
        loss = model(batch)
        loss.backward()
        optim.step(loss=2 * loss.detach())
        if job.step % EVERY == 0:
            params = list(model.parameters())
            with job.pause("evaluation"), torch.no_grad():
                for param in params:  # other weights for a while
                    param.mul_(2)
                value = model(data.batch(0, 0, 0))
                time.sleep(EVALUATION_S if job.replica == job.rank == 0 else 0)  # stands for a long evaluation
                for param in params:
                    param.mul_(0.5)
            job.log({"eval/loss": value})
    whole = job.full_state_dict()
    found = {
        "average": digest(average.mean),
        "steps": average.steps,
        "model": digest(whole) if whole else "",
        "here": digest(dict(model.named_parameters())),
        "heard": heard,
        "loss": job.last.loss if job.last is not None else None,
    }
    (Path("runs/job") / f"held-{job.replica}-{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
