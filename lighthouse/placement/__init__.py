"""Where do the replicas run? The second pure decision of the lighthouse, beside the quorum, over the same state.

`machine.decide(state, event) -> (state, effects)` is `quorum.transition` and what follows for the replicas that
the lighthouse places on hosts. A host has an agent (`ft_hsdp.launch.host`), which reports what the host has and
gets its whole assignment as the answer (`signs.assigned`). There are no orders.

A replica rests, runs or ends:

    rests -> runs   it is wanted and due, and there are hosts for its ranks: an incarnation is assigned to them
    runs  -> ends   a rank ended, could not be started, or its host is lost: it is assigned to nobody any more
    ends  -> rests  all its processes are known to be gone (`signs.is_over`): what ended it is judged

Silence of an agent alone changes nothing while its replica asks for steps. A host is *lost* if its agent is silent
and its replica does not ask either; then others may take its place. That is no exit: an incarnation has *exited*
only if the agents of all its hosts say so, or a rank of it is known to have ended and nothing of it is left on any
host that can be heard: a commit needs the vote of every rank.

- `state`: the records. `signs`: what reports show, and which hosts replicas would get. `machine`: the decisions.
  `fill`: hosts for replicas.
"""
