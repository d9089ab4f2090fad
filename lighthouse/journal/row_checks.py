"""Checks of the rows that a worker sends: which are accepted, and cut to which size. Pure: `now` comes in."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, ValidationError
from pydantic_core import SchemaValidator
from typing_extensions import TypedDict

from ft_hsdp.analysis.commits import MAX_VALUES, VALUE_NAME
from ft_hsdp.bounded import checker, complaint
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.core.traces import GroupTrace, RankTrace
from ft_hsdp.errors import ProtocolViolation
from ft_hsdp.event_table import EVENTS
from ft_hsdp.jsonl import is_finite
from ft_hsdp.protocol import MAX_COUNT, Count, RankBeat
from lighthouse.overview.machines import MEASURES
from lighthouse.overview.overview import JobInfo, Row

DAY_S = 86400.0  # a row may be so far from now; otherwise its sender's clock is wrong
MAX_ROW = 8192  # bytes of a row as JSON
MAX_REASON = 2000  # characters
MAX_DEPTH = 6
MAX_HOST = 255  # characters
MAX_PAUSE = 80  # characters
MAX_WAITS = 16
# Of a trace:
MAX_GROUPS, MAX_MARKS, MAX_LINES = 64, 8, 12
MAX_NAME, MAX_LINE = 64, 160  # characters of a group or an operation, and of a line of a stack

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_OWN = frozenset({"lighthouse", "admin", "diagnosis"})  # sources that a worker never is
_SUPERVISED = frozenset({"supervisor", "chaos"})
_NUMBERS = ("loss", "lr", "lr_scale", "norm", "ftar_bytes", "ftar_s", "tokens")  # None if they are no number

Name = Annotated[str, Field(pattern=f"^{_NAME.pattern}$")]
Lineage = Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=100 * DAY_S, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class RowSender:
    replica: int | None
    incarnation: str | None


def sender(source: str, about: JobInfo) -> RowSender:
    if source == "supervisor":
        return RowSender(None, None)
    name = IncarnationId.parse(source)
    if name is None or name.replica >= about.slots:
        raise ProtocolViolation(f"source {source[:80]!r} is neither 'supervisor' nor an incarnation of this job")
    return RowSender(name.replica, source)


def event(raw: Mapping[str, Any], who: RowSender, about: JobInfo, now: float) -> Row:
    """Return an event row as it may be stored.

    A replica's events are stored under its own number and incarnation, whatever the row says.

    Args:
        now: Unix seconds; replaces a time that is more than a day off.

    Raises:
        ProtocolViolation: it is not an event, is too large, or is one that only the lighthouse may send.
    """
    name = raw.get("event")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProtocolViolation(f"event {str(name)[:80]!r} is no name of 1 to 64 letters and digits")
    source = raw.get("source")
    if not isinstance(source, str):
        source = ""
    if source in _OWN or (name in EVENTS and EVENTS[name].decision):
        raise ProtocolViolation(f"event {name} from {source[:20]!r}: only the lighthouse says that")
    row = plain(raw)
    if who.replica is not None:
        row |= {"source": "replica", "replica": who.replica, "incarnation": who.incarnation}
    else:
        row["source"] = source if source in _SUPERVISED else "supervisor"
        if "replica" in row:
            row["replica"] = _index(row["replica"], "replica", about.slots)
        if not isinstance(row.get("incarnation"), str | None):
            raise ProtocolViolation("incarnation is no text")
    if "rank" in row:
        row["rank"] = _index(row["rank"], "rank", about.ranks)
    for key in ("step", "epoch"):
        if row.get(key) is not None:
            row[key] = _count(row[key], key, MAX_COUNT)
    row["t"] = _time(row.get("t"), now)
    row["reason"] = str(row.get("reason") or "")[:MAX_REASON]
    return sized(row)


class _CommitRow(TypedDict):
    """What the overview needs of a row of the log of commits."""

    step: Count
    epoch: Count
    attempt: NotRequired[Count]
    lineage: Lineage
    contributors: list[Count]
    total: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    step_s: Seconds
    waits: Annotated[dict[Name, Seconds], Field(max_length=MAX_WAITS)]
    role: Literal["contribute", "behind"]
    units: NotRequired[Count | None]  # a row of an earlier version has none
    units_wanted: NotRequired[Count | None]
    copied_bytes: NotRequired[Count | None]  # of a step for which hosts copied from each other


class _LoggedRow(TypedDict):
    step: Count
    epoch: Count
    lineage: NotRequired[Lineage]  # of the state from which alone the values follow
    values: Annotated[
        dict[Annotated[str, Field(pattern=f"^(?:{VALUE_NAME.pattern})$")], Finite | None],
        Field(min_length=1, max_length=MAX_VALUES),
    ]


_COMMIT, _LOGGED = checker(_CommitRow), checker(_LoggedRow)


def commit(raw: Mapping[str, Any], about: JobInfo, now: float) -> Row:
    row: Row = {"attempt": 0, "units": None, "units_wanted": None, **_checked("commit", _COMMIT, raw)}
    row["t"] = _time(raw.get("t"), now)
    row["contributors"] = sorted(set(row["contributors"]))
    _count(row["step"], "step", about.steps)
    _count(row["total"], "total", about.slots)
    if row["contributors"]:
        _index(row["contributors"][-1], "contributor", about.slots)
    if len(row["contributors"]) > row["total"]:
        raise ProtocolViolation(f"commit: {len(row['contributors'])} contributors of {row['total']}")
    for key in _NUMBERS:
        value: Any = raw.get(key)
        row[key] = value if is_finite(value) and abs(value) <= MAX_COUNT else None
    return row


def logged(raw: Mapping[str, Any], about: JobInfo, now: float) -> Row:
    row = _checked("logged", _LOGGED, raw)
    _count(row["step"], "step", about.steps)
    return {**row, "t": _time(raw.get("t"), now)}


def _checked(what: str, of: SchemaValidator, raw: Mapping[str, Any]) -> Row:
    try:
        row: Row = of.validate_python(raw, strict=True)
    except ValidationError as error:
        raise ProtocolViolation(f"{what}: {complaint(error)}") from None
    return row


def micro_batches_of(raw: Mapping[str, Any], replica: int, data_ranks: int) -> int:
    """Return how many micro-batches each rank of ``replica`` has trained by a commit row; 1 if it does not say.

    Args:
        data_ranks: of a replica with all its ranks; the row tells if it had fewer.
    """
    told = raw.get("contributions")
    runs = told if type(told) is list else ()
    mine = [c for c in runs if isinstance(c, Mapping) and c.get("replica") == replica]
    units = sum(int(c["units"]) for c in mine if type(c.get("units")) is int)
    narrow = (c["width"] for c in mine if type(c.get("width")) is int and 0 < c["width"] < data_ranks)
    return min(MAX_COUNT, max(1, -(-units // next(narrow, data_ranks))))


def plain(raw: Mapping[str, Any]) -> Row:
    """Return a copy that strict JSON can hold: NaN and infinities become None, text valid Unicode.

    Raises:
        ProtocolViolation: a value has a type that JSON does not know, or is nested more than `MAX_DEPTH` deep.
    """
    copied = _plain(raw, MAX_DEPTH)
    assert isinstance(copied, dict)
    return copied


def sized(row: Row) -> Row:
    size = len(json.dumps(row, separators=(",", ":"), allow_nan=False))
    if size > MAX_ROW:
        raise ProtocolViolation(f"event {row['event']}: {size} bytes; allowed: {MAX_ROW}")
    return row


def _plain(value: object, depth: int) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_COUNT else str(value)[:40]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth == 0:
        raise ProtocolViolation(f"a row is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {str(_plain(str(k), 0)): _plain(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v, depth - 1) for v in value]
    raise ProtocolViolation(f"a row holds a {type(value).__name__}")


def _time(value: Any, now: float) -> float:
    return float(value) if is_finite(value) and abs(value - now) <= DAY_S else now


def _index(value: object, what: str, size: int) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size):
        raise ProtocolViolation(f"{what} {str(value)[:40]!r} is not one of 0 to {size - 1}")
    return value


def _count(value: object, what: str, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ProtocolViolation(f"{what} {str(value)[:40]!r} is not a number from 0 to {most}")
    return value


def beats(ranks: Sequence[RankBeat], who: RowSender, about: JobInfo) -> list[RankBeat]:
    if ranks and who.replica is None:
        raise ProtocolViolation("beats come from replicas")
    if len(ranks) > about.ranks:
        raise ProtocolViolation(f"beats of {len(ranks)} ranks; a replica has {about.ranks}")
    for beat in ranks:
        _index(beat.rank, "rank", about.ranks)
    return [
        replace(
            beat,
            host=_text(beat.host, MAX_HOST),
            pause=_text(beat.pause, MAX_PAUSE),
            still_s=_amount(beat.still_s, "still_s"),
            trace=None if beat.trace is None else _trace(beat.trace, about),
            t=_amount(beat.t, "t"),
            load={name: value for name, value in beat.load.items() if name in MEASURES},
        )
        for beat in ranks
    ]


def _text(value: str, most: int) -> str:
    return str(_plain(value[:most], 0))


def _trace(trace: RankTrace, about: JobInfo) -> RankTrace:
    if len(trace.groups) > MAX_GROUPS:
        raise ProtocolViolation(f"trace of {len(trace.groups)} groups; allowed: {MAX_GROUPS}")
    return replace(
        trace,
        groups=tuple(_group(group, about) for group in trace.groups),
        doing=_text(trace.doing, MAX_PAUSE),
        stack=tuple(_text(line, MAX_LINE) for line in trace.stack[:MAX_LINES]),
    )


def _group(group: GroupTrace, about: JobInfo) -> GroupTrace:
    for count in ("joined", "done", "received", "sent"):
        _count(getattr(group, count), count, MAX_COUNT)
    for seconds in ("in_s", "blocked_s"):
        _amount(getattr(group, seconds), seconds)
    if group.left is not None:
        _index(group.left.replica, "replica", about.slots)
        _index(group.left.rank, "rank", about.ranks)
    for mark in group.marks[-MAX_MARKS:]:
        _count(mark.number, "mark", MAX_COUNT)
        _amount(mark.t, "mark")
    name, op = _text(group.name, MAX_NAME), _text(group.op, MAX_NAME)
    return replace(group, name=name, op=op, marks=group.marks[-MAX_MARKS:])


def _amount(value: float, what: str) -> float:
    if not 0 <= value <= MAX_COUNT:  # NaN neither
        raise ProtocolViolation(f"{what} {value} is not a number from 0 to {MAX_COUNT}")
    return value
