"""A user's script: it trains the case that its first argument names, and writes the weights to its second one.

With a third argument its steps take so many seconds, until a test says hurry.
"""

import sys
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import ft_hsdp
from tests.compatibility.cases import CASES, Average, Source
from tests.support.slow_script import pause

WHOLE = StateDictOptions(full_state_dict=True)


def main() -> None:
    case, file = CASES[sys.argv[1]], sys.argv[2]
    step_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    job = ft_hsdp.join()
    torch.manual_seed(0)
    with torch.device("cpu" if case.weights is None else "meta"):
        model = case.model()
    case.shard(model, init_device_mesh("cpu", (job.ranks,)))
    if case.weights is not None:
        model.to_empty(device="cpu")
        weights: dict[str, Any] = dict(case.weights())
        set_model_state_dict(model, weights, options=WHOLE)
    job.adopt(model, find_unused_parameters=case.find_unused, batch_norm=case.batch_norm)
    average = Average(model) if case.average else None
    if average is not None:
        job.register_state("average", average.state_dict, average.load_state_dict)
        job.on_commit(average.update)
    made = case.optimizers(model)
    optim = job.optimizer(made, None if case.schedule is None else case.schedule(made))
    optim.clip = case.clip
    for batch in job.batches(Source(case, job.config.replicas, job.data_ranks)):
        if step_s:
            pause(step_s)
        if case.weigh is not None:
            job.weigh(case.weigh(batch))
        loss = case.loss(model, batch)
        loss.backward()
        optim.step(loss=loss.detach())
        if case.beside is not None:
            case.beside(job, model)
    weights = job.full_state_dict()
    if average is not None:
        means: dict[str, Any] = dict(average.mean)
        weights |= {f"average.{name}": mean.full_tensor() for name, mean in means.items()}
    if job.replica == 0 and job.rank == 0:
        torch.save(weights, file)


if __name__ == "__main__":
    main()
