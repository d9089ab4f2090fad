"""Admission: what a message may claim at all, and whether its sender trains the same model. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ft_hsdp.core.assignment import Refused
from ft_hsdp.errors import EXIT_CONFIG, ProtocolViolation
from ft_hsdp.protocol import Ask, Processes
from lighthouse.quorum import Incarnation
from lighthouse.state import State

EPOCHS_AHEAD = 2**20  # an epoch further above all known ones is nobody's
STEPS_AHEAD = 2
TERM_LIMIT = 2**53
MAX_ADDRESSES = 64

_INCARNATION = re.compile(r"([0-9]{1,3})-[!-~]{1,200}")
_LINEAGE = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"[!-~]{1,255}:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Job:
    """What all replicas share; None until the first of them said it."""

    config_hash: str | None = None
    layout: str | None = None
    numerics: str | None = None

    def refusal(self, ask: Ask) -> Refused | None:
        """Why the sender of `ask` cannot be part of this job, if so."""
        pairs = (
            ("config hash", self.config_hash, ask.config_hash),
            ("model layout", self.layout, ask.layout),
            ("numerics", self.numerics, ask.numerics),
        )
        for what, mine, theirs in pairs:
            if mine is not None and mine != theirs:
                line = f"{what} {theirs[:40]!r} is not the job's {mine[:40]!r}: all replicas need the same"
                return Refused(line, EXIT_CONFIG)
        return None

    def with_first(self, ask: Ask) -> Job:
        """This job, told by `ask` what nobody had said before."""
        numerics = ask.numerics if self.numerics is None else self.numerics
        return Job(self.config_hash or ask.config_hash, self.layout or ask.layout, numerics)


def incarnation(text: str) -> Incarnation:
    """``0-abcd-1`` as (0, "0-abcd-1"): an incarnation's name starts with its replica's id.

    Raises:
        ProtocolViolation: no such name.
    """
    match = _INCARNATION.fullmatch(text)
    if match is None:
        raise ProtocolViolation(f"incarnation {text[:40]!r} is not REPLICA-RUN-RESTARTS")
    return int(match[1]), text


def check_ask(s: State, ask: Ask) -> None:
    """Whether a report can be true.

    Raises:
        ProtocolViolation: it cannot; one line names the field.
    """
    r = ask.report
    last = max(s.policy.steps, s.head.step if s.head else 0)
    epochs = s.epoch + EPOCHS_AHEAD
    limits = (
        ("replica", r.replica, s.policy.total - 1),
        ("state.step", r.state.step, last + STEPS_AHEAD),
        ("step", r.step, last + STEPS_AHEAD),
        ("state.commit_epoch", r.state.commit_epoch, epochs),
        ("epoch", r.epoch, epochs),
        ("after", r.after, epochs),
        ("max_term", r.max_term, TERM_LIMIT),
        ("prepared.epoch", r.prepared.epoch if r.prepared else 0, epochs),
        ("prepared.step", r.prepared.step if r.prepared else 0, last + STEPS_AHEAD),
        *(("equal", other, s.policy.total - 1) for other in r.equal),
        *(("leaving", other, s.policy.total - 1) for other in r.leaving),
        *(("lagging", other, s.policy.total - 1) for other in r.lagging),
        *(("diverged", other, s.policy.total - 1) for other in r.diverged),
    )
    for name, value, largest in limits:
        _within(name, value, largest)
    _named("incarnation", r.incarnation, r.replica)
    if not _LINEAGE.fullmatch(r.state.lineage):
        raise ProtocolViolation(f"state.lineage {r.state.lineage[:40]!r} is not 32 hex digits")
    for addresses in (ask.ring, ask.state):
        if len(addresses) > MAX_ADDRESSES or not all(_ADDRESS.fullmatch(a) for a in addresses):
            raise ProtocolViolation(f"ring and state hold at most {MAX_ADDRESSES} times host:port")


def check_processes(s: State, processes: Processes) -> frozenset[Incarnation]:
    """What has exited, according to a picture that can be true.

    Raises:
        ProtocolViolation: it cannot be true.
    """
    exited = frozenset(map(incarnation, processes.exited))
    for replica in (*processes.running, *processes.lost, *(r for r, _ in exited)):
        _within("replica", replica, s.policy.total - 1)
    for replica, running in processes.running.items():
        if running is None:
            continue
        _named("running", running, replica)
        if (replica, running) in exited:
            raise ProtocolViolation(f"incarnation {running[:40]!r} cannot both run and have exited")
    return exited


def _within(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise ProtocolViolation(f"{name} is {str(value)[:24]}; possible: 0 to {largest}")


def _named(field: str, text: str, replica: int) -> None:
    if incarnation(text)[0] != replica:
        raise ProtocolViolation(f"{field}: {text[:40]!r} is not an incarnation of replica {replica}")
