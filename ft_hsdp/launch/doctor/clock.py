"""The clock: beside the lighthouse's, or by what the kernel says of it.

Nothing in training reads the time of day; rows of events and metrics carry it, and TLS believes it.
"""

from __future__ import annotations

import ctypes
import time
from email.utils import parsedate_to_datetime

from ft_hsdp.errors import LighthouseUnreachable
from ft_hsdp.launch.doctor.finding import Bad, Subject, Undecided
from ft_hsdp.launch.doctor.services import healthz

WRONG_S = 60.0  # rows of several machines can no longer be told in order; certificates may seem not yet valid
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_ASIDE = "rows more than a day off are refused, TLS and logs suffer earlier"


def clock(subject: Subject) -> str:
    """How far this clock is off, or whether anybody sets it."""
    if subject.lighthouses:
        try:
            least, most = beside_lighthouse(subject)
        except LighthouseUnreachable as error:
            raise Undecided(f"{error}: its clock is not known") from None
        off = 0.0 if least <= 0 <= most else min(least, most, key=abs)
        if abs(off) > WRONG_S:
            raise Bad(
                f"{abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} the lighthouse; start chrony or "
                f"systemd-timesyncd on both ({_ASIDE})"
            )
        return (
            f"{abs(off):.0f} s from the lighthouse's" if abs(off) >= 1 else "within a second of the lighthouse's"
        )
    if synchronised():
        return "synchronised, says the kernel"
    why = "the kernel says that nobody sets it"
    if not subject.spans:
        return f"{why}; a job on one machine does not mind"
    raise Undecided(
        f"{why}, which is usual in containers; compare with --lighthouse URL, or start chrony on the host "
        f"({_ASIDE})"
    )


def beside_lighthouse(subject: Subject) -> tuple[float, float]:
    """By how many seconds the lighthouse's clock is ahead of this one, at least and at most.

    Its answer names a whole second, and took its time. Raises LighthouseUnreachable, Undecided.
    """
    before = time.time()
    response = healthz(subject)
    after = time.time()
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()
    except (KeyError, TypeError, ValueError):
        raise Undecided("the lighthouse does not say what time it is") from None
    return there - after, there + 1.0 - before


class _Timex(ctypes.Structure):
    """struct timex; only what comes first in it is read here."""

    _fields_ = (("modes", ctypes.c_uint), ("rest", ctypes.c_byte * 512))


def synchronised() -> bool:
    """Whether the kernel's clock is set by somebody. Raises Undecided."""
    try:
        said = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(_Timex()))
    except (OSError, AttributeError):
        said = -1
    if said < 0:
        raise Undecided("adjtimex(2) cannot be asked here; is the clock synchronised?")
    return bool(said != _UNSYNCHRONISED)
