"""How the ranks of a host become processes, on the machine of its agent.

Read the modules in this order:

    ranks       `LocalRanks` starts ranks; `HeldRanks`: what a host has of an incarnation
    base        the processes of one incarnation, or of a spare
    spares      groups that are warm, and wait to be assigned; gpus: which GPUs ranks use
    forkserver  the agent's side of the fork server
    held        the same where the agent has a holder, in whose process the fork server's side is
    zygote      the fork server: the preloaded process from which ranks are forked
    entry       what runs in each rank: the trainer, or the user's script or function
    children    ranks as children of the agent's process: signals, exits, adoption
    rank_end    why a rank ended: what it said itself, and what the kernel says of the machine's hardware then
    processes   how any process is started so that it does not outlive its parent

The way of a start: `LocalRanks.start` -> `SparePool.take`, or `ForkServer.spawn` -> (socket) `zygote` -> fork ->
the rank waits on its `AssignmentLine` -> it is assigned to a replica -> `entry.main`, which runs the
trainer or the user's script.

Only `entry` imports `train`, and the agent's process must not import it, or it would be as large as a rank.
`zygote`, which runs in another process, loads it by its name, with torch, before it forks.
"""
