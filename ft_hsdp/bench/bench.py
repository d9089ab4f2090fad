"""`bench ftar`: chooses who takes part, runs the measures, and puts the result together."""

from __future__ import annotations

from typing import Any, TextIO

from ft_hsdp.bench.bandwidth import BANDWIDTH
from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.goals import verdicts
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.kill import KILL
from ft_hsdp.bench.memory import check_memory
from ft_hsdp.bench.options import Options
from ft_hsdp.bench.plan import Log, Measure, Plan
from ft_hsdp.bench.reconfigure import RECONFIGURE
from ft_hsdp.bench.roster import CONTENDERS, Contender, absent
from ft_hsdp.bench.spin import SPIN
from ft_hsdp.errors import ConfigError

MEASURES: dict[str, Measure] = {
    "bandwidth": BANDWIDTH,
    "spin": SPIN,
    "kill": KILL,
    "reconfigure": RECONFIGURE,
}


def run(options: Options, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`, a line for each figure.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a worker fails,
    DataCorruption where a sum is wrong.
    """
    log = Log(stream)
    todo = {
        name: _prepare(name, measure, options) for name, measure in MEASURES.items() if name in options.measures
    }
    result, started = begin("ftar", log)
    result["contenders"] = {}
    for name, measure in MEASURES.items():
        result[name] = []
        if name in todo:
            contenders, plan, left_out = todo[name]
            for text in left_out:
                log.note(text)
            result["contenders"] |= {who: contender.text for who, contender in contenders.items()}
            result[name] = measure.run(contenders, plan, log)
    result["link"] = link(Scene(rounds=options.rounds), log) if "link" in options.measures else []
    return finish(result, verdicts(result), log, started)


def _prepare(name: str, measure: Measure, options: Options) -> tuple[dict[str, Contender], Plan, list[str]]:
    """Who takes part in a measure, what it does, who is left out and why. Raises ConfigError."""
    wanted = options.contenders or measure.contenders
    why = {who: absent(CONTENDERS[who]) or measure.unfit(CONTENDERS[who]) for who in wanted}
    left_out = [f"{who} is left out of {name}: {reason}" for who, reason in why.items() if reason]
    if all(why.values()):
        raise ConfigError("--contenders", ",".join(wanted), f"one that can take part ({'; '.join(left_out)})")
    contenders = {who: CONTENDERS[who] for who in wanted if not why[who]}
    plan = Plan(options.members or measure.members, options.sizes or measure.sizes, options.rounds)
    check_memory(contenders.values(), max(plan.members), max(plan.sizes, default=0))
    return contenders, plan, left_out
