"""Rules: what the operator chose for all replicas of a job alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Poison = Literal["exclude_contributor", "skip_step"]


@dataclass(frozen=True, slots=True)
class Rules:
    """``checkpoint_every`` steps there is a durable checkpoint (0: never). A replica that is behind keeps at most
    ``catchup_log_steps`` committed gradients until its base is there. ``poison`` says what becomes of a step in
    which some gradient is not finite: it is tried again without it, or committed without changing any weight.
    A batch that was left out of ``poison_retries`` steps is given up.
    ``keep_last``: when all that hold the state leave on request, one of them writes a checkpoint of it first.
    """

    checkpoint_every: int = 0
    catchup_log_steps: int = 64
    poison: Poison = "exclude_contributor"
    keep_last: bool = False
    poison_retries: int = 3


DEFAULT = Rules()


def difference(theirs: Mapping[str, str], agreed: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first dotted key in which two configurations differ, with both values; None: in no key.

    A value is the text that `config.agreed` gives; "nothing" stands for a key that one side does not know.
    """
    for key in sorted(theirs.keys() | agreed.keys()):
        mine, other = theirs.get(key, "nothing"), agreed.get(key, "nothing")
        if mine != other:
            return key, mine, other
    return None
