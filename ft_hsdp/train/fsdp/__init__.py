"""The model of a rank: how FSDP2 shards it inside the replica, and how its gradients leave the replica.

A model is sharded by `fully_shard`, by the user, a trainer or `adopted_model.shard`. From then on it is adopted:
nothing of it is changed but FSDP2's hooks. Read in this order.

- `param_groups` finds the parameter groups of FSDP2 in a model, in the order of their buckets. It refuses what
  cannot be adopted, each in one line that names the module. It is the only module of ft_hsdp that uses names of
  FSDP2 that are not public.
- `adopted_model` makes one bucket of each group. `Bucket` takes the flat gradient shard of a group inside
  backward, and hands it on when it is complete. `AdoptedModel` is what the rest of `train` uses of a model: its
  trainable parameters, its buckets, and `sync`, `finish`, `assign` and `clear` around a step. `weighed` multiplies
  the gradient of a model's output by the weight of the micro-batch.
- `frozen` is what the state does not hold, and finds what training changes of it; `moving_buffers` makes declared
  buffers part of the state.

Nothing here knows replicas, rings or commits: `train.step_driver` takes the buckets to the reducer, and
`train.state.live_state` brings the sums back. Nothing here imports another package of ft_hsdp but its errors.

    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    adopted = AdoptedModel(model, ranks, ready=lambda bucket, flat: ...)
    adopted.sync(last=True)
    model(batch).backward()  # calls ready with each bucket
    adopted.finish()
    adopted.assign(sums)
"""
