"""The decisions of one replica, and the arithmetic that all replicas share: pure functions, standard library only.

A replica is one whole model, sharded over its ranks; rank 0 leads it. The leader holds a frozen `Replica`. Each
thing that happens to it is an event, and `replica.transition(replica, event)` returns the next `Replica` and
a tuple of effects: what the leader has to do now. The same code runs in production (`ft_hsdp.control.leader`), in
the model checker (`tests.model`), and in the transcripts of tests/core.

Read the modules in this order:

- `state_id`: the name of a committed state: commit epoch, step and a hash over its history.
- `ledger`: which batches are inside a state, and which batch each replica takes next.
- `commit`: the record of a step (who contributed how much), the commit token that decides it, the votes of the
  ranks on their sums. A vote has no weight.
- `units`: what one contributor trains in a step, and so the weight of its gradient; which data it takes.
- `grant`: what the lighthouse grants, what a replica reports to it, and the other answers.
- `host_report`: what the agent of a host reports to the lighthouse, and what it is to run.
- `traces`: what a rank tells of its collectives, from which `ft_hsdp.analysis` finds who keeps a job waiting.
- `events`, `effects`: the input and the output of `transition`.
- `replica_state`: `Replica`, field by field, and its phases.
- `replica`: `transition`: one rule for each event.
- `voting`: from the reduced gradient to the verdict, and what follows from it.
- `checkpoint`: which replica writes a durable checkpoint, and which one retries.
- `ring`: the schedule of the all-reduce: operations, chunks, counters (FT-HSDP §4.2).
- `randomness`: seeds and permutations, each a function of a place.
- `failure_detector`: when a silent neighbour counts as lost; `ftar.heartbeat` feeds it. `restart`: the name of one
  life of a replica, and when it is started again.

This package imports nothing but itself and the standard library, and of that no clock, no randomness and no I/O:
`pyproject.toml` enforces it. Time enters as an argument or as an event. Two leaders that see the same events
therefore decide the same, and what the model checker finds holds in production.

Example: a replica that has just started asks the lighthouse for its first step:

    zero = state_id.initial(config_hash, weights_digest)
    replica = Replica(me=0, incarnation="0-a-0", steps=100, state=zero, ring_state=zero)
    replica, effects = transition(replica, events.Started())
    assert isinstance(effects[0], RequestGrant)
    replica, effects = transition(replica, events.Answered(grant))  # Configure, RunBatch, Reduce
"""
