"""The sections on timeouts and restarts; docs/timeouts.md shows what depends on what.

All waits are here except four that belong to their subjects: `ftar.timeout_s`, `quorum.lease_s`,
`quorum.catchup_wait_s` and `lighthouse.etcd_lease_s`. `config.BOUNDS` checks all of them against each other.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from ft_hsdp.config.base import Int, Number, PositiveSeconds, Seconds, Section, refuse


class TimeoutsConfig(Section):
    """Seconds, from the shortest wait to the longest. A process that waits for others waits longer."""

    beat_s: Number = Field(
        0.05,
        gt=0,
        le=60,
        description="time between two signs of life to a neighbour; shorter finds a stop sooner and wakes "
        "the CPU more often",
    )
    suspect_grace_s: Seconds = Field(
        0.2,
        description="time for a suspect (its connection or its heartbeats ended) to ask; the others lose "
        "this time if the exit of a lost replica is not reported",
    )
    silence_s: PositiveSeconds = Field(
        0.5, description="shortest silence that makes a neighbour a suspect; irregular heartbeats make it longer"
    )
    silence_grace_s: Seconds = Field(
        1.0,
        description="time for a member that is not suspected to ask, once its ring is broken: it may only be slow",
    )
    answer_wait_s: PositiveSeconds = Field(
        1.0, description="longest wait for a grant before the last one is repeated; never longer than a step took"
    )
    spawn_s: PositiveSeconds = Field(
        10.0,
        description="longest time to fork a rank; then that start has failed, and the fork server is replaced",
    )
    agent_answer_s: PositiveSeconds = Field(
        2.0,
        description="longest time that a state agent may hold up a vote, and one more for each GB of a shard; "
        "then training goes on without it",
    )
    news_s: Seconds = Field(
        1.0,
        description="how long a supervisor waits for the lighthouse to say whether a replica that ended early "
        "was told to end",
    )
    leave_s: PositiveSeconds = Field(
        2.0,
        description="how long a replica that leaves waits for the others to form a ring without it; slow links "
        "take longer",
    )
    connect_s: PositiveSeconds = Field(
        5.0,
        description="longest time to connect a new ring; a member that does not come is left out of the next one",
    )
    hello_s: PositiveSeconds = Field(
        5.0,
        description="time for a caller to prove the job's token, and again to send its first message; then its "
        "connection is closed; links with long round trips take longer",
    )
    supervisor_lease_s: PositiveSeconds = Field(
        5.0, description="silence of a replica's supervisor after which another one may start it"
    )
    edge_wait_s: PositiveSeconds = Field(
        30.0,
        description="how long a replica is left out that cannot connect to another one; each time twice as long",
    )
    evict_s: PositiveSeconds = Field(
        10.0, description="silence after which a suspect's supervisor is to kill it, so that it starts afresh"
    )
    reach_s: PositiveSeconds = Field(
        10.0,
        description="how long a replica that has never joined looks for its lighthouse; then it exits with 69",
    )
    agent_s: PositiveSeconds = Field(
        10.0,
        description="longest time for a host's state agent to come up; then the rank exits, and is started again",
    )
    stop_s: PositiveSeconds = Field(
        10.0,
        description="how long a replica that is told to leave may take to end its step before it is killed; "
        "preemption notices of clouds are 30 s and more",
    )
    lighthouse_s: PositiveSeconds = Field(
        10.0, description="how long the lighthouse of `up` may fail to answer; then it is killed and started again"
    )
    ask_s: PositiveSeconds = Field(
        20.0,
        description="how long the lighthouse keeps a request that it cannot answer yet; then the replica asks "
        "again; shorter than the time for which proxies on the way allow a silent request",
    )
    together_s: PositiveSeconds = Field(
        30.0,
        description="how long the other ranks of a replica have, once one of them is done, until they are killed",
    )
    gone_s: PositiveSeconds = Field(
        30.0, description="how long a killed process has to be gone: large memory and a hanging device take time"
    )
    listen_s: PositiveSeconds = Field(
        30.0,
        description="longest time for a lighthouse to listen and, where elected, to lead; slow disks take longer",
    )
    ranks_s: PositiveSeconds = Field(
        60.0, description="longest time for the ranks of one replica to find each other; then it is started again"
    )
    place_s: PositiveSeconds = Field(
        60.0,
        description="how long a replica may look for its place in a cluster before the others begin without "
        "it; it goes on looking, or goes on with fewer ranks (memory.shrink_to)",
    )
    settle_s: Seconds = Field(
        60.0,
        description="how long spares wait for a replica that was started to contribute: they would take its CPUs",
    )
    stalled_s: PositiveSeconds = Field(
        60.0, description="how long a replica that chaos keeps away for some steps waits for the next one of them"
    )
    checkpoint_again_s: PositiveSeconds = Field(
        60.0,
        description="pause after a checkpoint that failed; then it is tried again, if no other replica has "
        "written it; at most three times, then the next one due counts",
    )
    save_s: PositiveSeconds = Field(
        60.0,
        description="how long a rank that is done goes on with a checkpoint that it has begun; large models on "
        "slow disks take longer",
    )
    boot_s: PositiveSeconds = Field(
        120.0,
        description="longest time for the imports of the process from which ranks are forked; file systems in a "
        "network are slow",
    )
    final_wait_s: PositiveSeconds = Field(
        120.0,
        description="how long finished replicas serve the final state to the others; a replica that comes later "
        "ends without it",
    )
    return_wait_s: Seconds = Field(
        120.0,
        description="how long a step is kept while a replica that may come back with it is started again; 0: it "
        "is given up at once",
    )
    start_s: PositiveSeconds = Field(
        600.0,
        description="longest time from the start of a replica's processes to its check-in; then they are killed "
        "and started again; large models are built, compiled and read in more time",
    )
    load_s: PositiveSeconds = Field(
        600.0,
        description="how long a rank waits for another of its replica that reads or writes its shard; slow disks "
        "take longer",
    )
    linger_s: PositiveSeconds = Field(
        600.0,
        description="how long a host's state agent keeps its copies without a rank; then it frees the memory",
    )
    step_s: PositiveSeconds = Field(
        1800.0,
        description="how long a trainer may make no progress (no micro-batch, no gradient) before its rank ends "
        "itself; longer than a compilation or an evaluation",
    )
    pause_s: PositiveSeconds = Field(
        600.0,
        description="longest pause that a training loop may announce (job.pause), for an evaluation for example: "
        "the others wait for so long, and then as for a trainer that hangs",
    )
    start_wait_s: Seconds | None = Field(
        None, description="how long the first step waits for all replicas; null waits for all that can be placed"
    )


class RestartConfig(Section):
    """How often and how soon lost replicas are started again."""

    budget: Int = Field(
        20,
        ge=0,
        le=10**6,
        description="restarts per replica without progress before it is given up: what fails so often needs an "
        "operator",
    )
    backoff_s: Seconds = Field(
        0.0,
        description="wait before a second restart; doubles with each one that brought no step, to give a machine "
        "time to recover",
    )
    backoff_max_s: Seconds = Field(
        30.0, description="longest wait before a restart; a machine that was repaired is found within it"
    )
    hold_s: Seconds = Field(
        2.0, description="how long a cold restart may wait for the survivors' commit, whose CPUs it would take"
    )

    shortage_s: Seconds = Field(
        600.0,
        description="how long a shortage of processes, ports, descriptors, memory or room on a disk may prevent "
        "the start of a replica before it is given up; such starts cost none of restart.budget",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backoff_s > self.backoff_max_s:
            raise refuse(
                "backoff_s",
                self.backoff_s,
                f"at most restart.backoff_max_s ({self.backoff_max_s}): it is the first of those waits",
            )
        return self
