"""The sections on failures that are injected on purpose: `chaos`, and `debug` for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from ft_hsdp import fault_injection
from ft_hsdp.config.base import DAY_S, Int, Number, Seconds, Section, refuse
from ft_hsdp.config.running import MAX_RANKS, MAX_REPLICAS, ReplicaId
from ft_hsdp.fault_injection import INJECTED_BY_TESTS, PLACES

MOMENTS = ("at_step", "at_s", "rate_per_min")
ON_RANKS = ("signal", "host", "reset")
FOR_TESTS = ("disk_full", "slow_disk", "clock", "descriptors", "memory", "garbage")  # tests/support/os_faults.py
Target = Literal["fork_server", "agent", "supervisor", "lighthouse"]


class ChaosConfig(Section):
    """A failure injected on purpose: once, or at a rate. docs/chaos.md describes the kinds."""

    kind: Literal["signal", "host", "helper", "partition", "reset", "flip"] = Field(
        "signal", description="what goes wrong"
    )
    at_step: Int | None = Field(None, ge=1, le=10**9, description="once, while this step is in flight")
    at_s: Number | None = Field(
        None, ge=0, le=30 * DAY_S, description="once, this many seconds after the first committed step"
    )
    rate_per_min: Number | None = Field(None, gt=0, le=6000, description="at random moments, this often a minute")
    replicas: tuple[ReplicaId, ...] = Field(
        (),
        description="ids of the replicas that are hit; with host, an empty list means all that have ranks there",
    )
    rank: Annotated[Int, Field(ge=0, lt=MAX_RANKS)] | None = Field(
        None,
        description="rank that is hit, or with kind host the rank whose host is hit; null: all with reset; else "
        "rank 0 with at_step or at_s, a random one with rate_per_min",
    )
    host: str | None = Field(
        None, min_length=1, description="the host all of whose ranks are hit, with kind host also its state agents"
    )
    target: Target | None = Field(None, description="with helper: the process that is hit")
    edge: tuple[Any, ...] | None = Field(
        None, description="with partition: the two ends between which no packet passes, [a, b] or [a, lighthouse]"
    )
    signal: Literal["KILL", "STOP", "TERM"] = Field("KILL", description="with signal and helper: the signal")
    down_steps: Int = Field(
        0, ge=0, le=10**6, description="with signal: steps that a lost replica stays away before its restart"
    )
    for_s: Seconds = Field(
        0.0,
        description="how long it lasts; 0: until the job ends; 0 with flip, reset and signals other than STOP",
    )
    reject: bool = Field(
        False,
        strict=True,
        description="with partition: connections are refused at once, not left waiting",
    )
    seed: Int = Field(0, ge=0, lt=2**63, description="seed of the random moments and victims")

    @model_validator(mode="before")
    @classmethod
    def _is_ours(cls, said: Any) -> Any:
        kind = said.get("kind") if isinstance(said, dict) else None
        if kind in FOR_TESTS:
            allowed = ", ".join(get_args(cls.model_fields["kind"].annotation))
            raise refuse("kind", kind, f"{allowed}; {INJECTED_BY_TESTS}")
        return said

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [moment for moment in MOMENTS if getattr(self, moment) is not None]
        if not given:
            raise refuse("at_step", None, f"exactly one of {', '.join(MOMENTS)} (none is given)")
        if len(given) > 1:
            raise refuse(given[-1], getattr(self, given[-1]), f"exactly one of {', '.join(MOMENTS)}")
        if len(set(self.replicas)) != len(self.replicas):
            raise refuse("replicas", list(self.replicas), "each replica once")
        for key, value, allowed in self._unfit():
            raise refuse(key, value, allowed)
        return self

    def _unfit(self) -> Iterator[tuple[str, object, str]]:
        """Yield the keys that do not go together: (key, value, what is allowed)."""
        kind, one = self.kind, self.target not in (None, "agent")
        if kind == "helper" and self.target is None:
            yield "target", None, f"one of {', '.join(get_args(Target))} with kind helper"
        if kind != "helper" and self.target is not None:
            yield "target", self.target, f"null with kind {kind}"
        if kind != "partition" and self.edge is not None:
            yield "edge", list(self.edge), f"null with kind {kind}: only a partition has an edge"
        if kind == "partition" and not self._is_edge():
            yield (
                "edge",
                self.edge and list(self.edge),
                "[a, b] or [a, lighthouse], two ends, with kind partition",
            )
        if self.host is not None and kind not in ON_RANKS:
            yield "host", self.host, f"null with kind {kind}: it does not hit ranks"
        if self.host is not None and (one or self.rank is not None):
            yield "host", self.host, "null with a target or a rank"
        whole = self.edge is not None or one
        if whole and self.replicas:
            yield "replicas", list(self.replicas), "[] with an edge, and with a target other than agent"
        if not whole and self.host is None and not self.replicas:
            yield "replicas", [], "at least 1 item"
        if self.rank is not None and (kind not in ON_RANKS or one):
            yield "rank", self.rank, f"null with kind {kind}: it does not hit one rank"
        yield from self._untimely()

    def _is_edge(self) -> bool:
        """Return whether `edge` has two different ends: two replicas, or a replica and the lighthouse."""
        ends = self.edge or ()
        replicas = [e for e in ends if type(e) is int and 0 <= e < MAX_REPLICAS]
        named = [e for e in ends if e == fault_injection.LIGHTHOUSE]
        return len(ends) == len(set(map(str, ends))) == len(replicas) + len(named) == 2 and bool(replicas)

    def _untimely(self) -> Iterator[tuple[str, object, str]]:
        """Yield what is wrong with the signal and with its duration: (key, value, what is allowed)."""
        kind, sends = self.kind, self.kind in ("signal", "helper")
        if not sends and self.signal != "KILL":
            yield "signal", self.signal, f"only with signal and helper: {kind} sends none"
        if kind == "helper" and self.signal == "TERM":
            yield "signal", self.signal, "KILL or STOP with kind helper"
        if self.down_steps and kind != "signal":
            yield "down_steps", self.down_steps, f"0 with kind {kind}"
        if self.reject and kind != "partition":
            yield "reject", True, f"false with kind {kind}"
        if kind == "helper" and self.target == "supervisor" and (self.signal, self.for_s > 0) != ("STOP", True):
            allowed = "STOP, with for_s above 0: the whole job ends with its supervisor"
            yield "signal", self.signal, allowed
        if self.for_s > 0 and sends and self.signal != "STOP":
            yield "for_s", self.for_s, f"0 with signal {self.signal}: only a STOP can be continued"
        if self.for_s > 0 and kind in ("flip", "reset"):
            yield "for_s", self.for_s, f"0 with kind {kind}: it happens once, and cannot be undone"


class FailpointConfig(Section):
    """A rank that fails at a named place of the code."""

    replicas: tuple[ReplicaId, ...] = Field(min_length=1, description="ids of the replicas that fail there")
    rank: Int = Field(0, ge=0, lt=MAX_RANKS, description="the rank that fails there")
    life: Int = Field(0, ge=0, le=10**6, description="in which incarnation: the number of restarts before it")
    step: Int = Field(ge=0, le=10**9, description="at this step, or the first time after it")
    signal: Literal["KILL", "STOP"] = Field("KILL", description="the signal that it sends itself")


class DebugConfig(Section):
    """Failures for tests of ft_hsdp itself."""

    faults: bool = Field(
        False,
        strict=True,
        description="take all orders of `launcher.py chaos`, also those that a process has to carry out itself",
    )
    failpoints: dict[str, FailpointConfig] = Field(
        {},
        description="named places in the code at which to fail (see docs/protocol.md)",
        json_schema_extra={"propertyNames": {"enum": [*PLACES]}},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.failpoints:
            if name not in PLACES:
                raise refuse(f"failpoints.{name}", name, f"one of {', '.join(PLACES)}")
        return self
