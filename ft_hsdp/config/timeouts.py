"""The sections on timeouts and restarts; docs/timeouts.md shows what depends on what.

An operator sets the keys of `TimeoutsConfig`. All other waits follow them: each `Derived` is a fixed multiple of
one key, and is read in the same way (`config.timeouts.gone_s`). `timeouts.factor` multiplies them all, once, when
the configuration is read.

Four waits belong to their subjects: `ftar.timeout_s`, `quorum.lease_s`, `quorum.catchup_wait_s` and
`lighthouse.etcd_lease_s`. `config.BOUNDS` checks all waits against each other.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Self, overload

from pydantic import Field, model_validator

from ft_hsdp.config.base import DAY_S, Int, Number, PositiveSeconds, Seconds, Section, refuse
from ft_hsdp.core.restart import BACKOFF_MAX_S


class Derived:
    """A wait that nobody sets: it is `times` the wait of the key `base`; `why` says what they have in common."""

    def __init__(self, base: str, times: float, why: str) -> None:
        self.base = base
        self.times = times
        self.why = why

    @overload
    def __get__(self, section: None, owner: type) -> Self: ...
    @overload
    def __get__(self, section: TimeoutsConfig, owner: type) -> float: ...
    def __get__(self, section: TimeoutsConfig | None, owner: type) -> Self | float:
        """Return the seconds in a section; of the class, return the rule itself."""
        return self if section is None else self.times * float(getattr(section, self.base))


class WaitKey(NamedTuple):
    """The key that one changes to change a wait, which is `times` as long."""

    name: str
    times: float


class TimeoutsConfig(Section):
    """Seconds, from the shortest wait to the longest. A process that waits for others waits longer."""

    factor: Number = Field(
        1.0,
        gt=0,
        le=100,
        description="multiplies every wait of this section, given or not: above 1 where machines, networks and "
        "disks are slow altogether",
    )
    silence_s: PositiveSeconds = Field(
        0.5, description="shortest silence that makes a neighbour a suspect; irregular heartbeats make it longer"
    )
    connect_s: PositiveSeconds = Field(
        5.0,
        description="longest time to connect a new ring; a member that does not come is left out of the next one",
    )
    evict_s: PositiveSeconds = Field(
        10.0, description="silence after which a suspect is to be killed, so that it starts afresh"
    )
    reach_s: PositiveSeconds = Field(
        10.0,
        description="how long a replica that has never joined looks for its lighthouse; then it exits with 69",
    )
    stop_s: PositiveSeconds = Field(
        10.0,
        description="how long a replica that is told to leave may take to end its step before it is killed; "
        "preemption notices of clouds are 30 s and more",
    )
    ranks_s: PositiveSeconds = Field(
        60.0, description="longest time for the ranks of one replica to find each other; then it is started again"
    )
    place_s: PositiveSeconds = Field(
        60.0,
        description="how long a replica may look for its place in a cluster before the others begin without "
        "it; it goes on looking, or goes on with fewer ranks (memory.shrink_to)",
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
    pause_s: PositiveSeconds = Field(
        600.0,
        description="longest pause that a training loop may announce (job.pause), for an evaluation for example: "
        "the others wait for so long, and then as for a trainer that hangs",
    )
    step_s: PositiveSeconds = Field(
        1800.0,
        description="how long a trainer may make no progress (no micro-batch, no gradient) before its rank ends "
        "itself; longer than a compilation or an evaluation",
    )
    start_wait_s: Seconds | None = Field(
        None, description="how long the first step waits for all replicas; null waits for all that can be placed"
    )

    # Between two signs of life to a neighbour.
    beat_s: ClassVar[Derived] = Derived("silence_s", 0.2, "one late beat, or two, must not make a suspect")
    # For a suspect (its connection or its heartbeats ended) to ask; lost if no exit of the replica is reported.
    suspect_grace_s: ClassVar[Derived] = Derived("silence_s", 0.4, "the others have waited for a suspect already")
    # For a member that is not suspected to ask, once its ring is broken: it may only be slow.
    silence_grace_s: ClassVar[Derived] = Derived(
        "silence_s", 2.0, "what nobody suspects gets more time than a suspect"
    )
    # For a grant before the last one is repeated; never longer than a step took.
    answer_wait_s: ClassVar[Derived] = Derived("connect_s", 0.2, "some round trips to the lighthouse")
    # For the others to form a ring without a replica that leaves.
    leave_s: ClassVar[Derived] = Derived("connect_s", 0.4, "the replica that leaves does not join that ring")
    # For a caller to prove the job's token, and again to send its first message.
    hello_s: ClassVar[Derived] = Derived("connect_s", 1.0, "who connects proves the token first")
    # For which a replica is left out that cannot connect to another one; each time twice as long.
    edge_wait_s: ClassVar[Derived] = Derived(
        "connect_s", 6.0, "most of the time must go to training, not to rings that do not form"
    )
    # Until a lighthouse of `up` that answers nothing is replaced.
    lighthouse_s: ClassVar[Derived] = Derived("evict_s", 1.0, "it is silent, as a replica may be")
    # For which the lighthouse keeps a request that it cannot answer yet.
    ask_s: ClassVar[Derived] = Derived("evict_s", 2.0, "a silent lighthouse is looked for elsewhere")
    # For the survivors' commit, by a cold restart, which would take their CPUs.
    hold_s: ClassVar[Derived] = Derived("stop_s", 0.2, "they end their step")
    # For the other ranks of a replica, once one of them is done.
    together_s: ClassVar[Derived] = Derived(
        "stop_s", 3.0, "they end a step, or a checkpoint, as a replica does that leaves"
    )
    # For a killed process to be gone: large memory and a hanging device take time.
    gone_s: ClassVar[Derived] = Derived("stop_s", 3.0, "what takes long to end takes long to disappear")
    # For a host's state agent to come up; then the rank exits, and is started again.
    agent_s: ClassVar[Derived] = Derived(
        "ranks_s", 1 / 3, "the other ranks of the replica wait for the one that waits for its agent"
    )
    # By which a state agent may hold up a vote, and one more for each GB of a shard.
    agent_answer_s: ClassVar[Derived] = Derived("ranks_s", 1 / 30, "other threads go on waiting for the agent")
    # For the next one of the steps for which chaos keeps a replica away.
    stalled_s: ClassVar[Derived] = Derived("step_s", 1 / 30, "it is the time of some steps")
    # For a checkpoint that a rank that is done has begun.
    save_s: ClassVar[Derived] = Derived(
        "final_wait_s", 0.5, "the others wait for the replica that writes the final state"
    )
    # To fork a rank; then that start has failed, and the fork server is replaced.
    spawn_s: ClassVar[Derived] = Derived("load_s", 1 / 60, "a machine that reads its disk slowly swaps slowly")
    # For a lighthouse to listen and, where elected, to lead.
    listen_s: ClassVar[Derived] = Derived("load_s", 0.05, "its store is on a disk")
    # Between a checkpoint that failed and the next attempt; three at most.
    checkpoint_again_s: ClassVar[Derived] = Derived("load_s", 0.1, "a disk that is slow or full needs time")
    # For the imports of the process from which ranks are forked.
    boot_s: ClassVar[Derived] = Derived("load_s", 0.2, "modules are read from a disk, or over a network")
    # For which a host's state agent keeps its copies without a rank, if its replica has no place there.
    linger_s: ClassVar[Derived] = Derived("load_s", 1.0, "who reads the copies may take that long")

    @classmethod
    def derived(cls) -> dict[str, Derived]:
        """Return the rule of each wait that nobody sets."""
        return {name: rule for name, rule in vars(cls).items() if isinstance(rule, Derived)}

    @classmethod
    def key_of(cls, wait: str) -> WaitKey:
        """Return the key behind a wait: itself, or the one that it follows."""
        rule = cls.derived().get(wait)
        return WaitKey(wait, 1.0) if rule is None else WaitKey(rule.base, rule.times)

    def multiplied(self) -> TimeoutsConfig:
        """Return the section with `factor` in its waits, and a factor of 1.

        So one that is written and read again is not multiplied twice.
        """
        given = {key: value for key, value in self if key != "factor" and value is not None}
        waits = {key: self.factor * value for key, value in given.items()}
        return TimeoutsConfig.model_construct(_fields_set=self.model_fields_set - {"factor"}, **waits)

    @model_validator(mode="after")
    def _check(self) -> Self:
        longest = max(value for key, value in self if key != "factor" and value is not None)
        if self.factor * longest > DAY_S:
            raise refuse("factor", self.factor, f"at most {DAY_S / longest:g}: no wait is longer than a day")
        return self


class RestartConfig(Section):
    """How often and how soon lost replicas are started again."""

    budget: Int = Field(
        20,
        ge=0,
        le=10**6,
        description="restarts per replica without progress before it is given up: what fails so often needs an "
        "operator",
    )
    backoff_s: Number = Field(
        0.0,
        ge=0,
        le=BACKOFF_MAX_S,
        description="wait before a second restart; doubles with each one that brought no step, up to a minute, to "
        "give a machine time to recover",
    )
    shortage_s: Seconds = Field(
        600.0,
        description="how long a shortage of processes, ports, descriptors, memory or room on a disk may prevent "
        "the start of a replica before it is given up; such starts cost none of restart.budget",
    )
