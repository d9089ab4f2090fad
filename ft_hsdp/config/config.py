"""The whole configuration, and the checks between its sections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from ft_hsdp import fault_injection
from ft_hsdp.config.base import Int, Section, refuse
from ft_hsdp.config.chaos import ChaosConfig, DebugConfig
from ft_hsdp.config.network import AlertConfig, LighthouseConfig, NetworkConfig, RayConfig
from ft_hsdp.config.running import (
    MAX_RANKS,
    MAX_REPLICAS,
    CheckpointConfig,
    FtarConfig,
    HostsConfig,
    JobConfig,
    MemoryConfig,
    QuorumConfig,
    StateConfig,
)
from ft_hsdp.config.timeouts import RestartConfig, TimeoutsConfig, WaitKey
from ft_hsdp.config.training import DataConfig, EvalConfig, LrConfig, ModelConfig, OptimConfig, TrainConfig
from ft_hsdp.core.restart import BACKOFF_MAX_S, RestartPolicy

_MODULE = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
ENTRY_PATTERN = rf"^([^\n\x00]*[^/\n\x00]\.py|{_MODULE}:[A-Za-z_][A-Za-z0-9_]*)$"
Module = Annotated[str, Field(pattern=rf"^{_MODULE}$")]


class Config(Section):
    """One job. Made by `ft_hsdp.config.load`; frozen; every key has a default."""

    job: JobConfig = Field(default_factory=JobConfig)
    replicas: Int = Field(3, ge=1, le=MAX_REPLICAS, description="replicas, each with a whole model")
    ranks_per_replica: Int = Field(
        2, ge=1, le=MAX_RANKS, description="ranks over which a replica shards its model"
    )
    ranks_per_unit: Int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="ranks that train the same micro-batch together: the degree of tensor parallelism of a model "
        "for job.adopt; it divides ranks_per_replica",
    )
    max_replicas: Int | None = Field(
        None,
        ge=1,
        le=MAX_REPLICAS,
        description="most replicas to which `scale` may grow the job, and the number of data shards; null: "
        "replicas",
    )
    spares: Int = Field(
        0,
        ge=0,
        le=MAX_REPLICAS * MAX_RANKS,
        description="warm processes in reserve, each with a model; a multiple of ranks_per_replica, because a "
        "lost replica is replaced as a whole",
    )
    hosts: HostsConfig = Field(default_factory=HostsConfig)
    entry: str | None = Field(
        None,
        description="what each rank runs: a Python script, such as my_train.py, or module:function; null: the "
        "built-in trainer",
    )
    args: tuple[str, ...] = Field((), description="arguments of entry, which finds them in sys.argv")
    preload: tuple[Module, ...] = Field(
        (),
        description="modules that the process from which ranks are forked imports once, and a restart need not; "
        "their import must start no thread and use no GPU",
    )
    entry_digest: str | None = Field(
        None,
        pattern="^[0-9a-f]{32}$",
        description="hash of entry's file, on which all replicas agree; the launcher sets it when the job starts",
    )
    train: TrainConfig = Field(default_factory=TrainConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    lr: LrConfig = Field(default_factory=LrConfig)
    ftar: FtarConfig = Field(default_factory=FtarConfig)
    quorum: QuorumConfig = Field(default_factory=QuorumConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    restart: RestartConfig = Field(default_factory=RestartConfig)
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    lighthouse: LighthouseConfig = Field(default_factory=LighthouseConfig)
    alerts: tuple[AlertConfig, ...] = Field(
        (), max_length=16, description="whom the lighthouse tells what needs people"
    )
    ray: RayConfig = Field(default_factory=RayConfig)
    state: StateConfig = Field(default_factory=StateConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    chaos: tuple[ChaosConfig, ...] = Field((), description="failures to inject")
    debug: DebugConfig = Field(default_factory=DebugConfig)

    @property
    def slots(self) -> int:
        """How many replicas there can be; their ids are below it."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def data_ranks(self) -> int:
        """How many data ranks a replica has: each trains micro-batches of its own."""
        return self.ranks_per_replica // self.ranks_per_unit

    @property
    def data_shards(self) -> int:
        """How many data shards there are: one that all replicas take from, or one for each."""
        return 1 if self.data.assignment == "global" else self.slots

    @property
    def keeps_last(self) -> bool:
        """Whether the state with which the job ends, or is stopped, is written to durable storage."""
        return self.checkpoint.every > 0 or self.checkpoint.dir is not None

    @property
    def checkpoint_s(self) -> float:
        """Longest time between two durable checkpoints; 0: steps count instead, or none is written."""
        by_time = self.checkpoint.every == 0 and self.checkpoint.dir is not None
        return self.checkpoint.every_s if by_time else 0.0

    @property
    def restart_policy(self) -> RestartPolicy:
        """When its replicas start again."""
        # One that waits at the end must come back while the others serve the final state.
        chosen, longest_s = self.restart, min(BACKOFF_MAX_S, self.timeouts.final_wait_s / 2)
        return RestartPolicy(chosen.budget, chosen.backoff_s, chosen.shortage_s, longest_s)

    @property
    def takes_faults(self) -> bool:
        """Whether its ranks listen for faults that they have to carry out themselves."""
        return self.debug.faults or any(rule.kind in fault_injection.HOOKED for rule in self.chaos)

    @property
    def _spare_hosts(self) -> int:
        """How many emulated hosts are spare, those of spare replicas included."""
        return self.hosts.spare + self.spares // self.ranks_per_replica * (self.hosts.per_replica or 0)

    def _emulates(self, host: str) -> bool:
        """Return whether an emulated host has this name."""
        match = re.fullmatch(r"r(0|[1-9]\d*)h(0|[1-9]\d*)|s(0|[1-9]\d*)", host, re.ASCII)
        if match is None:
            return False
        if match[3] is not None:
            return int(match[3]) < self._spare_hosts
        return int(match[1]) < self.slots and int(match[2]) < (self.hosts.per_replica or 0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        config = self
        if self.timeouts.factor != 1.0:
            config = self.model_copy(update={"timeouts": self.timeouts.multiplied()})
        wrong = _refusal(config, self.timeouts.factor) or _shrink_refusal(self)
        if wrong is not None:
            raise wrong
        if self.entry is not None and not re.fullmatch(ENTRY_PATTERN, self.entry):
            raise refuse("entry", self.entry, "a script whose name ends in .py, module:function, or null")
        for key in ("args", "entry_digest"):
            if self.entry is None and getattr(self, key):
                raise refuse(key, getattr(self, key), "nothing, unless entry names a script or a function")
        if self.eval.every and self.eval.data is None and self.entry is None:
            allowed = f"a file or folder of text, with eval.every ({self.eval.every}) and the built-in trainer"
            raise refuse("eval.data", None, allowed)
        if self.slots < self.replicas:
            raise refuse("max_replicas", self.max_replicas, f"at least replicas ({self.replicas}), or null")
        if self.ranks_per_replica % self.ranks_per_unit:
            allowed = f"a divisor of ranks_per_replica ({self.ranks_per_replica})"
            raise refuse("ranks_per_unit", self.ranks_per_unit, allowed)
        if self.hosts.per_replica is not None and self.ranks_per_replica % self.hosts.per_replica:
            allowed = f"a divisor of ranks_per_replica ({self.ranks_per_replica}), or null"
            raise refuse("hosts.per_replica", self.hosts.per_replica, allowed)
        if self.hosts.spare and self.hosts.per_replica is None:
            allowed = "0 without hosts.per_replica: it says how many hosts a replica has"
            raise refuse("hosts.spare", self.hosts.spare, allowed)
        if self.spares % self.ranks_per_replica:
            allowed = (
                f"a multiple of ranks_per_replica ({self.ranks_per_replica}): a replica is replaced as a whole"
            )
            raise refuse("spares", self.spares, allowed)
        if (self.memory.copies or 1) > 1 and self.state.snapshot == "on_demand":
            allowed = "1 or null with state.snapshot on_demand: states that are not copied outlive no host"
            raise refuse("memory.copies", self.memory.copies, allowed)
        if (self.memory.wait_s or 0.0) >= self.ftar.timeout_s:
            allowed = (
                f"less than ftar.timeout_s ({self.ftar.timeout_s}): the others would give up the ring meanwhile"
            )
            raise refuse("memory.wait_s", self.memory.wait_s, allowed)
        if self.network.tls == "on" and self.ftar.transport == "c10d":
            raise refuse("ftar.transport", "c10d", "another one with network.tls on: gloo does not encrypt")
        if self.optim.offload and self.train.device == "cpu":
            raise refuse("optim.offload", True, "false with train.device cpu: all is in host memory there")
        if self.quorum.min_replicas > self.replicas:
            raise refuse("quorum.min_replicas", self.quorum.min_replicas, f"at most replicas ({self.replicas})")
        least = self.quorum.min_replicas
        if self.quorum.allowed and not any(least <= n <= self.replicas for n in self.quorum.allowed):
            wanted = f"a value from quorum.min_replicas ({least}) to replicas ({self.replicas})"
            raise refuse("quorum.allowed", list(self.quorum.allowed), wanted)
        most = self.quorum.max_accumulate
        for name, given in {"refill": self.quorum.refill, "max_accumulate": most}.items():
            if given is not None and self.quorum.batch != "constant":
                raise refuse(f"quorum.{name}", given, "null, unless quorum.batch is constant")
        if most is not None and most < self.train.accumulate:
            raise refuse("quorum.max_accumulate", most, f"at least train.accumulate ({self.train.accumulate})")
        for i, rule in enumerate(self.chaos):
            ends = [] if rule.edge is None else [end for end in rule.edge if end != "lighthouse"]
            if any(r >= self.slots for r in (*rule.replicas, *ends) if isinstance(r, int)):
                raise refuse(
                    f"chaos.{i}.{'edge' if ends else 'replicas'}",
                    list(rule.edge or rule.replicas),
                    f"ids from 0 to {self.slots - 1} (there are {self.slots} replicas at most)",
                )
            if rule.host is not None and self.hosts.per_replica is not None and not self._emulates(rule.host):
                last = f"r{self.slots - 1}h{self.hosts.per_replica - 1}"
                spare = f", or s0 to s{self._spare_hosts - 1}" if self._spare_hosts else ""
                allowed = f"a host that there is: r<replica>h<index>, r0h0 to {last}{spare}"
                raise refuse(f"chaos.{i}.host", rule.host, allowed)
            if rule.rank is not None and rule.rank >= self.ranks_per_replica:
                raise refuse(
                    f"chaos.{i}.rank",
                    rule.rank,
                    f"0 to {self.ranks_per_replica - 1} (ranks_per_replica is {self.ranks_per_replica})",
                )
        return config


class Bound(NamedTuple):
    """The value at `key` is at most that at `other`, or below it."""

    key: str
    other: str
    why: str  # what would go wrong otherwise, for the error
    below: bool = False  # equal values are not allowed either
    where: Callable[[Config], bool] = lambda _: True  # for which configurations it counts

    def settable(self) -> WaitKey:
        """Return the key that one changes to change the wait at `key`."""
        return _settable(self.key)

    def words(self) -> str:
        """Return what may stand at the settable key, in terms of the one behind `other`."""
        most = _settable(self.other)
        times = most.times / self.settable().times
        return f"{'less than' if self.below else 'at most'} {'' if times == 1.0 else f'{times:.3g} x '}{most.name}"


def _settable(wait: str) -> WaitKey:
    """Return the key, with its section, that one changes to change a wait."""
    section, name = wait.split(".")
    if section != "timeouts":
        return WaitKey(wait, 1.0)
    key = TimeoutsConfig.key_of(name)
    return WaitKey(f"timeouts.{key.name}", key.times)


def _returning(c: Config) -> bool:
    return c.timeouts.return_wait_s > 0  # 0: no step waits


def _elected(c: Config) -> bool:
    return bool(c.lighthouse.etcd)


BOUNDS = (
    Bound("timeouts.connect_s", "ftar.timeout_s", "a ring that does not form goes before one that stands"),
    Bound("timeouts.silence_s", "timeouts.connect_s", "a stopped member must be found while a ring waits for it"),
    Bound("timeouts.silence_grace_s", "timeouts.evict_s", "a silent replica must be left out before it is killed"),
    Bound("timeouts.answer_wait_s", "quorum.lease_s", "the lease must outlast the waits under it"),
    Bound(
        "timeouts.answer_wait_s", "timeouts.ask_s", "a request must be open for as long as its answer is awaited"
    ),
    Bound("timeouts.hello_s", "timeouts.ranks_s", "the ranks of a replica greet while they wait for each other"),
    Bound("timeouts.evict_s", "quorum.lease_s", "the lease must outlast the waits under it"),
    Bound("quorum.catchup_wait_s", "ftar.timeout_s", "the others would give up the ring meanwhile", below=True),
    Bound("timeouts.ranks_s", "timeouts.start_s", "the ranks of a replica meet before it checks in"),
    Bound("ftar.timeout_s", "timeouts.step_s", "the others must name a replica that hangs before it ends itself"),
    Bound(
        "timeouts.boot_s",
        "timeouts.return_wait_s",
        "a replica must have the time to start before its step is given up (0: no step waits)",
        where=_returning,
    ),
    Bound(
        "timeouts.hold_s",
        "timeouts.return_wait_s",
        "a replica must be started before its step is given up (0: no step waits)",
        below=True,
        where=_returning,
    ),
    Bound(
        "timeouts.return_wait_s",
        "timeouts.linger_s",
        "the step for which a replica is awaited must still be in its host's memory",
    ),
    Bound(
        "timeouts.boot_s",
        "timeouts.final_wait_s",
        "a replica that is lost at the end must have the time to start while the final state is served",
    ),
    Bound(
        "lighthouse.etcd_lease_s",
        "timeouts.listen_s",
        "a lighthouse leads only when the lease of the one before it has run out",
        below=True,
        where=_elected,
    ),
    Bound(
        "lighthouse.etcd_lease_s",
        "quorum.lease_s",
        "training must go on until another lighthouse leads",
        below=True,
        where=_elected,
    ),
)
"""A process that waits for others waits longer than they do.

What holds for waits that follow one key, whatever its value, is not here; tests/test_timeouts.py has it.
"""


def _refusal(c: Config, factor: float) -> PydanticCustomError | None:
    """Return what is wrong with the timeouts of `c`, which have `factor` in them; None if they fit together."""
    for bound in BOUNDS:
        value, most = _at(c, bound.key), _at(c, bound.other)
        equal = math.isclose(value, most)  # multiples of one wait may differ in their last bit
        if bound.where(c) and (bound.below if equal else value > most):
            key = bound.settable()
            allowed = f"{bound.words()} ({round(most / key.times, 9)}): {bound.why}"
            if factor != 1.0 and "timeouts" in bound.key + bound.other:
                allowed += f"; timeouts.factor ({factor:g}) is in these waits"
            return refuse(key.name, round(value / key.times, 9), allowed)
    return None


def _shrink_refusal(c: Config) -> PydanticCustomError | None:
    """Return why `memory.shrink_to` cannot be what it is; None if it can."""
    least = c.memory.shrink_to
    if least is None:
        return None
    hosts, ranks = c.hosts.per_replica, c.ranks_per_replica
    if c.ranks_per_unit > 1:
        allowed = f"null with tensor parallelism (ranks_per_unit is {c.ranks_per_unit})"
    elif hosts is None or hosts < 2:
        allowed = "null, unless hosts.per_replica is 2 or more: a replica on one host loses all its ranks at once"
    elif ranks % hosts == 0 and least > (most := ranks - ranks // hosts):
        allowed = f"1 to {most}, the ranks of a replica without one of its {hosts} hosts, or null"
    else:
        return None
    return refuse("memory.shrink_to", least, allowed)


def _at(c: Config, key: str) -> float:
    section, name = key.split(".")
    return float(getattr(getattr(c, section), name))
