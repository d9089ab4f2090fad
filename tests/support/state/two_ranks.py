"""One rank of two: RANK and STORE in the environment; prints a JSON line of what it saw."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ft_hsdp.train.fsdp.adopted_model import AdoptedModel, shard
from ft_hsdp.train.state.packing import state_digest
from tests.support.state.odd_model import Odd, batch

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=2)
model = Odd()
seen: list[tuple[int, torch.Tensor]] = []
shard(model, list(model.parts), init_device_mesh("cpu", (2,)))
sharded = AdoptedModel(model, 2, lambda i, flat: seen.append((i, flat)))
digest = state_digest(sharded.params, {}, ({"lr": 0.1},))
model(batch(rank)).backward()
grads = {n: p.grad.full_tensor().flatten().tolist() for n, p in sharded.params.items()}
sharded.assign([flat.clone() for _, flat in seen])
again = {n: p.grad.full_tensor().flatten().tolist() for n, p in sharded.params.items()}
out = {
    "order": [i for i, _ in seen],
    "sizes": [flat.numel() for _, flat in seen],
    "planned": list(sharded.sizes),
    "digest": digest,
    "grads": grads,
    "assigned": again,
    "local": {n: p.to_local().flatten().tolist() for n, p in sharded.params.items()},
}
print(json.dumps(out))
sys.stdout.flush()
dist.destroy_process_group()
os._exit(0)  # what torch takes down at the end of an interpreter is not what is tested
