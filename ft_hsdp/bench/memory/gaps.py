"""Five ways to move copies of states over a link of 1 Gbit that FSDP uses, too: GEMINI's ablation.

One replica has two hosts, each in a network namespace of its own. Its model waits instead of computing, so the
links are what counts.

- none: no copies;
- blocking: what one writes by hand: after each update each rank sends its shard to the other and waits for it;
- greedy: ft_hsdp's copies, which leave as soon as they can;
- reactive: they leave while no rank of the host communicates;
- planned: they keep to Algorithm 2, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ft_hsdp.bench.hsdp.measure import sigterm_unwinds
from ft_hsdp.bench.hsdp.network import SUBNET, Network, unfit
from ft_hsdp.bench.hsdp.processes import PRODUCT, HsdpSetup, TrainingProcesses, start, start_lighthouse
from ft_hsdp.bench.results import ProgressLog, ResultRow, interleave, ratio, ratio_interval, spread
from ft_hsdp.bench.scope import scratch
from ft_hsdp.bench.workers.link import greet
from ft_hsdp.state.pacing import PROFILED

MODES: Mapping[str, int] = {"none": 1, "blocking": 1, "greedy": 2, "reactive": 2, "planned": 2}  # memory.copies
WATCHED = ("reactive", "planned")  # the modes in which ranks say when they communicate
STEPS = 15  # of a block; the one before them has a pause, and a profile of 20 steps leaves out two
LEAD = 1  # steps of a block that are not timed: the copies of its first state travel beside the first timed step
SETTLE_S = 0.5  # after a block: the copies of its last state must not meet the next block
SETUP = HsdpSetup(
    replicas=1,
    ranks=2,
    hosts=2,
    steps=STEPS,
    waiting=(1 << 18, 0.4),
    sections={"model": {"layers": 8, "dim": 64, "heads": 2}, "network": {"allow": [SUBNET]}},
)
PROFILES = 2 * PROFILED + 2  # steps before the first block: a profile, and one with the bandwidth known
WARM = 4  # the same, of the modes that keep no profile


def gaps(rounds: int, log: ProgressLog, setup: HsdpSetup = SETUP) -> list[ResultRow]:
    """Return one row; none, and a note, where there can be no such network. Raises Retryable."""
    if why := unfit():
        log.note(f"gaps is left out: {why}")
        return []
    crews: dict[str, TrainingProcesses] = {}
    sent: dict[str, list[float]] = {name: [] for name in MODES}
    by_plan: dict[str, list[bool]] = {
        name: [] for name in MODES
    }  # whether a plan was in force at both ends of a block
    with sigterm_unwinds(), scratch() as (stack, folder):
        network = stack.enter_context(Network(setup.replicas * setup.hosts, setup.rate, setup.congestion))
        for number, (name, copies) in enumerate(MODES.items()):
            own = folder / str(number)
            own.mkdir()
            memory = {"memory": {"copies": copies}}
            mine = replace(setup, copying=name, sections={**setup.sections, **memory})
            start_lighthouse(network, mine, own, stack)
            crews[name] = start(name, PRODUCT, number, network, mine, own, stack)
            greet(crews[name].links)
            crews[name].train(PROFILES if name in WATCHED else WARM)
        log.say(f"{setup.hosts} hosts, links of {setup.rate}: {', '.join(crews)}")

        def block(name: str) -> float:
            before, said = network.sent(), crews[name].said
            seconds = crews[name].train(setup.steps, LEAD)
            time.sleep(SETTLE_S)
            went = [after - begin for after, begin in zip(network.sent(), before, strict=True)]
            sent[name].append(max(went) / (setup.steps + LEAD))
            by_plan[name].append(all(answer["planned"] for answer in (*said, *crews[name].said)))
            return seconds

        before = {name: crew.said for name, crew in crews.items() if name in WATCHED}
        took = interleave({name: partial(block, name) for name in crews}, rounds)
    idles = {name: idle(said, crews[name].said) for name, said in before.items()}
    row = report(setup, rounds, took, sent, idles, {name: by_plan[name][-rounds:] for name in WATCHED})
    for name, found in row["times"].items():
        log.say(f"{name}: {found['ratio']:.3f} times the step without ({found['low']:.3f} to {found['high']:.3f})")
    return [row]


def idle(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> float | None:
    """Return which part of the copies' bytes left while no rank communicated; None if nobody knows."""
    counts = [(b["sent"] - a["sent"], b["idle"] - a["idle"]) for a, b in zip(before, after, strict=True)]
    total = sum(sent for sent, _ in counts)
    return ratio(sum(idle for _, idle in counts), total) if total else None


def report(
    setup: HsdpSetup,
    rounds: int,
    took: Mapping[str, list[float]],
    sent: Mapping[str, Sequence[float]],
    idles: Mapping[str, float | None],
    by_plan: Mapping[str, Sequence[bool]],
) -> ResultRow:
    """Return the row.

    Args:
        setup: what was trained.
        rounds: blocks of each mode.
        took: seconds of a step, of each block, by mode.
        sent: bytes that a host has sent in a step, of each block, by mode.
        idles: which part of the copies' bytes left in idle spans, by mode.
        by_plan: whether copies kept to a plan, as `CopiesPaced.planned` says, of each block, by mode.
    """
    return {
        "replicas": setup.replicas,
        "ranks": setup.ranks,
        "hosts": setup.hosts,
        "rate": setup.rate,
        "rounds": rounds,
        "steps_per_block": setup.steps,  # each beside the copies of the state before it, where there are copies
        "modes": {name: spread(seconds) for name, seconds in took.items()},
        "times": {name: ratio_interval(seconds, took["none"]) for name, seconds in took.items() if name != "none"},
        "link_bytes_per_step": {name: round(sorted(each)[len(each) // 2]) for name, each in sent.items()},
        "idle_share": {name: share for name, share in idles.items() if share is not None},
        "planned_share": {name: ratio(sum(blocks), len(blocks)) for name, blocks in by_plan.items()},
    }
