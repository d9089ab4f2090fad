"""What it costs that replicas have different numbers of ranks (`bench width`).

- `bench`: the measures by name;
- `reshape`: a state goes from 4 ranks to 3, beside torch.distributed.checkpoint through tmpfs.

The goals of each row are in `bench.goals.width`.

The call path: `bench width` -> `bench.run` -> one function for each measure -> a row of the result.
"""
