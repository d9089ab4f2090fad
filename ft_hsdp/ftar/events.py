"""Events: what a group tells its owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ft_hsdp.core.commit import CommitToken
from ft_hsdp.core.grant import Grant
from ft_hsdp.protocol import RingAbort


@dataclass(frozen=True, slots=True)
class Events:
    """Whom to tell, on the control loop."""

    connected: Callable[[int], None]
    broken: Callable[[RingAbort], None]
    shown: Callable[[Grant], None]
    token: Callable[[CommitToken], None]
