"""The state of one rank: what it holds, its copies, and with which state it begins.

Read the modules in this order:

    live_state     the committed state that the rank holds: apply, load, copy; what two replicas of unequal widths
                   compare of their states
    packing        how its tensors become bytes and come back
    snapshots      copies of each state in the memory of the host's state agent
    checkpointing  a rank's part in writing and loading checkpoints
    known_shards   which shards of the replica's states the job's agents keep, and those that are cut for another
                   number of ranks
    copies         has copies made on other hosts, while the network is idle; copy_plan: which
    recovery       with which state a replica begins, from the memory of hosts or a checkpoint; how it checks in
    block_store    static data of the user in the memory of hosts; block_data and block_submission are parts of it

The way of a state: ``job._apply`` changes the live state; `SnapshotWriter` copies it into the agent's memory; the
vote on the next step says that the copy is complete. After a failure `Restoration` finds the newest state of
which every shard is somewhere, and loads it into the live state of all ranks.

All ranks of a replica load the same state, or none does. A state is only copied once it is committed, so what a
recovery finds is part of the job's lineage.

The agents, the servers and the fetch are in `ft_hsdp.state`. This package is the trainer's side of them.
"""
