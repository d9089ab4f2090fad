"""A user's script: it trains the case that its first argument names, and writes the weights to its second one."""

from __future__ import annotations

import sys

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import ft_hsdp
from tests.compatibility.cases import CASES, Source


def main() -> None:
    case, file = CASES[sys.argv[1]], sys.argv[2]
    job = ft_hsdp.join()
    torch.manual_seed(0)
    model = case.model()
    case.shard(model, init_device_mesh("cpu", (job.ranks,)))
    job.adopt(model, find_unused_parameters=case.find_unused)
    made = case.optimizers(model)
    optim = job.optimizer(made, None if case.schedule is None else case.schedule(made))
    optim.clip = case.clip
    for batch in job.batches(Source(case, job.config.replicas, job.data_ranks)):
        if case.weigh is not None:
            job.weigh(case.weigh(batch))
        loss = case.loss(model, batch)
        loss.backward()
        optim.step(loss=loss.detach())
        if job.over:
            weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if job.replica == 0 and job.rank == 0:
                torch.save(weights, file)


if __name__ == "__main__":
    main()
