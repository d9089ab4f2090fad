"""What the user's loop hears of the job: committed steps, states that were fetched, and the end.

A callback on a commit is part of applying the step: it runs on every rank of every replica that applies it, in
order, on the main thread, before the state gets its name. So what it does to state that the job holds
(`train.user_state`) is part of the committed state. This includes the steps that a replica applies while it
catches up, which its loop does not see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A committed step, as all replicas saw it."""

    step: int  # from 1
    contributors: tuple[int, ...]  # the replicas whose gradients are in it
    loss: float  # weighted mean over the contributors; NaN if no replica told one
    gradient_norm: float  # of the gradient that was applied, before clipping
    lr: float  # learning rate of the first parameter group
    units: int  # micro-batches of one rank that are in it
    updated: bool  # whether it changed the weights: no if its gradient was not finite, or nothing in it counts
    epoch: int  # in which it was committed

    @staticmethod
    def of(record: CommitRecord, lr: float) -> CommittedStep:
        """Return what ``record`` says to the user's loop; ``lr`` is the learning rate that it leads to."""
        told = record.step, record.contributors, record.loss, record.norm, lr, record.units, record.updates
        return CommittedStep(*told, record.epoch)


OnCommit = Callable[[CommittedStep], object]
OnRejoin = Callable[[int], object]
OnLeave = Callable[[str], object]

Callback = TypeVar("Callback", bound=Callable[..., object])


class Callbacks:
    def __init__(self) -> None:
        self._of: dict[str, list[Any]] = {"on_commit": [], "on_rejoin": [], "on_leave": []}
        self._fixed = False
        self._exit: SystemExit | None = None  # with which one has ended training

    def fix(self) -> None:
        """Take no more callbacks from now on: all replicas have to call the same ones from the first step on."""
        self._fixed = True

    def add(self, kind: str, callback: Callback) -> Callback:
        """Add a callback, and return it: so it may be a decorator.

        Args:
            kind: "on_commit", "on_rejoin" or "on_leave".
        """
        if not callable(callback):
            raise ConfigError(f"job.{kind}", callback, "a function")
        if self._fixed:
            raise ConfigError(f"job.{kind}", name_of(callback), "a call before the first batch of job.batches")
        self._of[kind].append(callback)
        return callback

    def call(self, kind: str, argument: object, after: Callable[[], None] = lambda: None) -> None:
        """Call what waits for a committed step, for a state that replaces the live one, or for the end.

        Where one exits with 0, the others are called all the same, and `leave` exits.

        Args:
            after: Called after each.
        """
        for callback in self._of[kind]:
            try:
                called(f"job.{kind}({name_of(callback)})", callback, argument)
            except SystemExit as end:
                if end.code or kind == "on_leave":
                    raise
                self._exit = end
            after()

    def leave(self) -> None:
        """Exit now, between two steps, if a callback has exited with 0."""
        if self._exit is not None:
            raise self._exit


class CallbackFailed(Exception):
    """A callback raised an error, which is its cause. The rank ends with it: its state is no committed one."""


def called(what: str, function: Callable[..., object], *arguments: object) -> None:
    """Call a function of the user; ``what`` names it in the error.

    Raises:
        CallbackFailed: It raised an error, which is the cause of this one.
    """
    try:
        function(*arguments)
    except Exception as error:
        why = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
        raise CallbackFailed(f"{what} failed: {why}") from error


def name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
