"""Committed states of a replica: their layout in memory, the copies of them, and how a replica gets one back.

A committed state is the parameters, the optimizer's tensors and the ledger after a step that all members of the
ring have decided on (`core.state_id` names it). A snapshot is a packed copy of one rank's shard of it, with a
manifest and a checksum for each chunk. There are three ways back to a state:

    from its host   the state agent keeps the snapshots of a dead rank      state.agent.client.StateAgent.acquire
    from disk       the newest valid checkpoint                             state.checkpoint.catalog.resume
    from its peers  a healthy replica serves the same state over HTTP       state.transfer.fetch.fetch

A replica that starts takes the newest state that its host or the disk has. If it is still behind the others
then, it fetches theirs.

Read the modules in this order:

- `shared_memory`: memory that outlives the process that wrote it, and the snapshots in it.
- `pacing`: when copies for other hosts leave: in the idle spans of the network.
- `transfer`: the layout and manifest of a shard; serving and fetching shards over HTTP (FT-HSDP §4.4).
- `agent`: the process that owns the snapshots of a host's ranks, and the ranks' connection to it.
- `replica_group`: the exchange of bytes between the ranks of one replica, for checkpoints.
- `checkpoint`: durable checkpoints on a shared file system.

The package knows nothing of rings, grants or training: it must not import `ft_hsdp.ftar`, `ft_hsdp.control` or
`ft_hsdp.train`, and `pyproject.toml` enforces that. `ft_hsdp.train.state.snapshots` decides when a snapshot is
taken, and `ft_hsdp.train.state.recovery` what a starting replica loads.

Example: a snapshot of live tensors, in memory of the state agent:

    memory = agent.stage(state)                                # uint8 [layout.nbytes], or None: no slot is free
    checksums = pack(layout, tensors, torch.from_numpy(memory))
    agent.staged(state, shard_manifest.encode(manifest))       # ``manifest`` has these checksums
    agent.order(Settle(state, True))                           # once every rank of the replica has staged it
"""
