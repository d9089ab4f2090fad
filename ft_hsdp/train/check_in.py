"""How a rank that is warm joins its job: it learns who it is, restores its state, and checks in.

`check_in` does it in this order, each step of which waits for the other ranks of the replica:

    RankRuntime       all that does not depend on the replica; a spare stops here until it is assigned
    begin, start      the incarnation: journal, state agent, the ring's listener
    restore           the newest state in memory or in a checkpoint
    check_claims      the ranks compare what they are and hold
    join              the leader asks the lighthouse for the first step

The ranks of a replica that contradict each other do not join: another start may mend it (75).
"""

from __future__ import annotations

import json
from dataclasses import asdict

from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import Retryable
from ft_hsdp.memory.replacement import RankClaim, disagreement
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.runtime import RankRuntime
from ft_hsdp.train.state.checkpointing import Checkpoints, missed
from ft_hsdp.train.state.known_shards import Recoverer
from ft_hsdp.train.state.recovery import Restoration
from ft_hsdp.train.step_log import StepLog


def check_claims(ranks: ReplicaGroup, replica: int, mine: RankClaim) -> None:
    """Compare what the ranks of a replica are and hold. Blocks; a collective of all of them."""
    told = [json.loads(each) for each in ranks.gather(json.dumps(asdict(mine)).encode())]
    claims = [
        RankClaim(**{**each, "hosts": tuple(each["hosts"]), "state": StateId(**each["state"])}) for each in told
    ]
    wrong = disagreement(claims)
    if wrong:
        raise Retryable(f"the ranks of replica {replica} contradict each other: {wrong}")


def open_log(runtime: RankRuntime, warm: float) -> StepLog:
    """Open the files of a replica in the run's directory, and note when it was ready. On rank 0."""
    journal, identity, model = runtime.journal, runtime.identity, runtime.model
    journal.note(identity.began, "ReplicaBooted", "its processes know which replica they are")
    name = f"{type(model.model).__module__}.{type(model.model).__qualname__}"
    parameters = sum(p.numel() for p in model.params.values())
    why = "model, optimizer and process group are ready"
    journal.note(warm, "ReplicaWarmed", why, model=name, parameters=parameters)
    folder = runtime.place.run / "replicas" / str(identity.replica)
    return StepLog(folder, identity.incarnation, runtime.reporter.commit, journal.lost, runtime.reporter.log)


def restored(runtime: RankRuntime, checkpoints: Checkpoints) -> StateId:
    """Bring the live state, which is the initial one, to the newest one that can be had, and return it.

    A collective of the replica. Blocks.
    """
    config, identity, live_state = runtime.config, runtime.identity, runtime.live_state
    where = identity.replica, identity.restarts, identity.host, runtime.place.token
    timeouts = config.timeouts
    recoverer = Recoverer(*where, runtime.holders, timeouts.reach_s, timeouts.load_s / 2)
    memory = runtime.snapshots, runtime.ranks, checkpoints, config.state.snapshot == "every_step"
    Restoration(live_state, *memory, runtime.journal, recoverer).run()
    state = live_state.state
    assert state is not None
    runtime.snapshots.mark_current(state)
    runtime.copies.mark_current(state)
    return state


def check_in(runtime: RankRuntime, state: StateId, checkpoints: Checkpoints) -> None:
    """Join the job with a state. A collective; blocks until all ranks of the replica have checked in."""
    place, identity = runtime.place, runtime.identity
    wanted = 0
    if place.rank == 0:
        wanted = missed(runtime.config, checkpoints.folder, state.step, runtime.journal)
    mine = RankClaim(place.rank, place.ranks, identity.incarnation, identity.shared, identity.hosts, state)
    check_claims(runtime.ranks, identity.replica, mine)
    runtime.join(state, wanted)
