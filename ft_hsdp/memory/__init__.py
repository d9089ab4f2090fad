"""Copies of the state in host memory: who keeps one, and what a replica recovers from.

Every rank's shard of each committed state is in the memory of its host's state agent. N replicas hold N copies of
a shard. These modules decide what to do with them; they move no byte. The words: a *host* is what is lost at once,
a *shard* is what one rank of a replica holds, a *copy* is one complete shard of one state in one agent.

Read the modules in this order:

- `hosts`: where a host stands (zone, rack), and the failure domains that hosts share.
- `placement`: which hosts form a group that keeps copies for each other (GEMINI §4, Algorithm 1), and who takes
  the place of a lost holder while all others stay (ReStore §IV-E).
- `copies`: which copies a membership lacks, and who makes them. Healthy replicas count as copies.
- `recovery`: the newest state that can be put together from all agents (GEMINI §6, DeadPool §VI-D).
- `replacement`: what is done about a failure, and which spare host takes the place of a lost one (DeadPool §V-C).
- `schedule`: which bytes of a copy go into which idle span of the network (GEMINI §5, Algorithm 2), and of which
  states copies are made.
- `blocks`: which hosts hold which blocks of a user's static data, and who reads which (ReStore §IV, §V).
- `shape`: how FSDP2 cuts a state, and what a rank of another number of ranks takes from whom.
- `parameters`: which block of a parameter each rank has, also with tensor parallelism, and its row in a log.
- `lanes`: which rows of the gradient replicas of unequal width sum together, and which of their ranks have them.

All of them act in jobs, and the model checker calls `copies` (ADR 34). What copies are worth is computed in
`ft_hsdp.analysis`.

This package imports `ft_hsdp.core` and the standard library, and of that no clock, no randomness and no I/O. All
ranks that see the same grant decide the same.

Example: eight hosts in racks of two keep two copies of each shard. No rack holds both.

    racks = [Host.parse(f"{i // 2}/h{i}") for i in range(8)]
    [[host.name for host in group] for group in groups(racks, 2, "rack")]
    # [["h0", "h2"], ["h4", "h6"], ["h1", "h3"], ["h5", "h7"]]
"""
