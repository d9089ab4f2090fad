"""What it costs that replicas have different numbers of ranks (`bench width`).

Read the modules in this order:

    bench      the measures by name
    reshape    a state goes from 4 ranks to 3: by parts from memory to memory, and by DCP through tmpfs
    allreduce  replicas of 4 and 3 ranks sum a gradient in lanes, beside replicas of 4 and 4
    blocks     loads of lost blocks, scattered, consecutive and from one source, beside ReStore's formulas
    links      a slow link for each server of such a load
    pair       one of two replicas has fewer ranks for a while: units per second, and what the other one waits for
    lone       one replica loses a host, goes on with fewer ranks, and grows when the host is back
    losses     hosts that are lost at random moments: the audit, the check of the logs and the replay
    figures    the tables

In `reshape` each rank is a process: 4 state servers with a shard each, 3 ranks that fetch theirs, and for
torch.distributed.checkpoint (DCP) 4 ranks that save and 3 that load. The two ways take turns. After each turn the
receivers compare every byte with what the shard has to be.

The bytes that the 3 ranks read from their sockets are counted, beside the least that their shards can
need: the bytes of their tensors.

The goals of each row are in `bench.goals.width`.

The call path: `bench width` -> `bench.run` -> one function for each measure -> a row of the result.
"""
