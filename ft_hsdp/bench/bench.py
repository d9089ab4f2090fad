"""`bench ftar`: chooses who takes part, runs the measures, and puts the result together."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

import psutil

from ft_hsdp.bench.bandwidth import BANDWIDTH
from ft_hsdp.bench.goals import verdicts
from ft_hsdp.bench.kill import KILL
from ft_hsdp.bench.machine import machine, now, versions
from ft_hsdp.bench.options import Options, size_name
from ft_hsdp.bench.plan import Log, Measure, Plan
from ft_hsdp.bench.reconfigure import RECONFIGURE
from ft_hsdp.bench.roster import CONTENDERS, Contender, absent
from ft_hsdp.bench.spin import SPIN
from ft_hsdp.errors import ConfigError

MEASURED: dict[str, Measure] = {
    "bandwidth": BANDWIDTH,
    "spin": SPIN,
    "kill": KILL,
    "reconfigure": RECONFIGURE,
}
SPARE = 1.2  # of the memory that the tensors take
BUSY = 1.0  # load from which on others have disturbed


def run(options: Options, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`, a line for each figure.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a worker fails,
    DataCorruption where a sum is wrong.
    """
    start = time.monotonic()
    log = Log(stream)
    result: dict[str, Any] = {"bench": "ftar", "date": now(), "machine": machine(), "versions": versions()}
    result["contenders"] = {}
    if (load := result["machine"]["load_1min_before"]) > BUSY:
        log.note(f"the machine was busy: a load of {load:g} before; read nothing into these figures")
    for name, measure in MEASURED.items():
        result[name] = []
        if name in options.measures:
            plan = Plan(options.members or measure.members, options.sizes or measure.sizes, options.rounds)
            contenders = _contenders(name, measure, options.contenders or measure.contenders, log)
            _check_memory(contenders, plan)
            result["contenders"] |= {who: contender.text for who, contender in contenders.items()}
            result[name] = measure.run(contenders, plan, log)
    result["goals"] = [asdict(verdict) for verdict in verdicts(result)]
    result["notes"] = log.notes
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def _contenders(name: str, measure: Measure, wanted: tuple[str, ...], log: Log) -> dict[str, Contender]:
    """Those who can take part. Raises ConfigError where none can."""
    why = {who: absent(CONTENDERS[who]) or measure.unfit(CONTENDERS[who]) for who in wanted}
    reasons = [f"{who} is left out of {name}: {reason}" for who, reason in why.items() if reason]
    if all(why.values()):
        raise ConfigError("--contenders", ",".join(wanted), f"one that can take part ({'; '.join(reasons)})")
    for reason in reasons:
        log.note(reason)
    return {who: CONTENDERS[who] for who in wanted if not why[who]}


def _check_memory(contenders: Mapping[str, Contender], plan: Plan) -> None:
    """Raises ConfigError where the tensors of all contenders, alive at once, do not fit."""
    largest = max(plan.sizes, default=0)
    copies = sum(contender.copies for contender in contenders.values())
    need = SPARE * copies * largest * max(plan.members)
    free = psutil.virtual_memory().available
    if need > free:
        allowed = f"what fits into {free / 2**30:.1f} GiB; all contenders at once take {need / 2**30:.1f} GiB"
        raise ConfigError("--sizes", size_name(largest), allowed)
