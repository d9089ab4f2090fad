"""What copies of states in host memory cost, and what they save (`bench memory`).

Read the modules in this order:

    bench     the measures by name; steps with copies and without, and what copies take where none are needed
    gaps      five ways to move copies over a slow link between two hosts (GEMINI §7.4)
    lost      hosts that are lost: how long until the next new step, from memory and from a checkpoint
    flips     bytes that flip in a shard or its manifest, at rest and on the way

`step`, `none` and `gaps` train in the processes of `bench.hsdp`, one block of one contender at a time. `lost`
and `union` run whole jobs, whose hosts are emulated, as `bench recovery` does. `flips` needs no job: it damages
one byte at a time, and restores the state from agents' stores and state servers, by `train.state.recovery`.

The goals of each row are in `bench.goals.memory`.

The call path: `bench memory` -> `bench.run` -> one function for each measure -> a row of the result.
"""
