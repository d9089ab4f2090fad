"""The control plane of one replica: its leader, the channels of its ranks, its line to the lighthouse.

Rank 0 of a replica is its leader. It feeds `ft_hsdp.core` with events and carries out the effects: some are
requests to the lighthouse, most are orders to all ranks (FT-HSDP §4.1). Losing the leader ends a rank: a replica
lives or dies as a whole.

Read the modules in this order:

- `leader`: `Leader` drives the core of its replica. All of it runs on the control loop of rank 0, so it has no
  locks.
- `grant_requests`: how the leader asks the lighthouse, and the lease while there is no answer.
- `rank_channel`: orders and reports (`RankBus`), over one TCP connection from each other rank to rank 0
  (`RankHub`, `RankLine`).
- `lighthouse_client`: which lighthouse is asked, over HTTP, and what becomes of one that does not answer.
- `sensors`: what a rank uses of its machine, and what that has left, measured beside everything else.
- `telemetry`: `Decisions` writes the core's decisions into the journal; `Reporter` sends rows to the lighthouse.
- `watchdog`: what one rank watches so that no hang lasts: its siblings, itself, its parent process.
- `exit_watch`: a process that outlives the ranks and reports their exit.
- `key_table`: the keys and values in rank 0 with which the ranks of one replica find each other.
- `rank_store`: torch's view of that table: the torch.distributed store of one replica.

This package imports no tensors (except `rank_store`, which is a `torch.distributed.Store`), nothing of
`ft_hsdp.ftar`, `ft_hsdp.state` or `ft_hsdp.train`: they are neighbours or above. `ft_hsdp.train.runtime` joins the
parts. Everything that comes from a socket passes `ft_hsdp.handshake` and `ft_hsdp.protocol` first.

The main call path of one step:

    rank:   RankLine.send(Vote)                           each rank holds its reduced shard
    leader: Leader.received(Vote) -> VoteTally.record     all votes are in
    leader: Leader.handle(Reduced) -> transition          SendToken, and later the verdict
    leader: RankHub.broadcast(Commit, RunBatch)           every rank applies
    leader: LighthouseClient.ask(QuorumRequest)           its answer becomes Answered: the next step
"""
