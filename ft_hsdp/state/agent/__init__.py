"""The state agent: a process on each host that keeps the snapshots of a replica's ranks when the ranks die.

A rank connects to the agent of its replica over a Unix socket. The agent allocates shared memory, and the rank
writes its snapshots into it; only orders travel over the socket. When the rank dies, the next incarnation lists
what is there and reads it back. Other replicas fetch the same snapshots over HTTP from the agent, so that a
fetch costs the trainer nothing (GEMINI §5.1, FT-HSDP §4.4).

The life of a snapshot:

    stage           the rank gets a slot to write into; one that is not read and not needed is reused
    staged          all bytes are written; the rank's mapping becomes read-only, the agent keeps the manifest
    mark_settled    all ranks of the replica have staged the state; older snapshots may be overwritten
    acquire, borrow the rank, or another replica, reads it; its checksums are compared first

Read the modules in this order:

- `slots`: `SnapshotSlots` decides, for one shard, which slot is written next and which snapshots are kept.
- `shard`: memory and checksums of the snapshots of one shard, or of one slice of a user's static data.
- `store`: `SnapshotStore`: the shards of all ranks of the host, those that it keeps for other hosts, and slices.
- `messages`: the orders and answers on the socket.
- `copies`: `CopyFetcher` fetches shards of other hosts (GEMINI §4, ADR 34), and slices, that a rank has ordered.
- `starter`: `Starter` starts an agent, and replaces one that no longer answers.
- `client`: `StateAgent`, a rank's end of the socket; `BlockAgent`, another one for slices.
- `session`: the agent's end: it carries out the orders of one connection.
- `server`: who is let in, and the process itself.

`server` and `client` must not import torch, because the agent starts in a fraction of a second without it;
`pyproject.toml` enforces that.

Example:

    agent = StateAgent.connect(token, replica=0, rank=0, ranks=1, nbytes=layout.nbytes, deadline_s=10.0)
    newest = agent.list()[0].state
    memory, header = agent.acquire(newest)
"""
