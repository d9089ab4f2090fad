"""A killed rank's state from the memory of its host, beside the usual way through a file (safetensors)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from functools import partial

from ft_hsdp.bench.results import ProgressLog, ResultRow, check_room, ratio, size_name, spread
from ft_hsdp.bench.scope import scratch, spawn
from ft_hsdp.bench.workers.link import ask, greet, spawn_worker
from ft_hsdp.errors import DataCorruption
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.secret import TOKEN_VARIABLE

COPIES = 6  # of a state in memory at once: two ranks, the agent, the file, and while it is saved and loaded


def local(sizes: Sequence[int], rounds: int, log: ProgressLog) -> list[ResultRow]:
    """Return a row for each size: after SIGKILL of a rank, so many times each way.

    The clock starts when the next rank has its imports and its tensors.

    Raises:
        Retryable: A process fails.
        DataCorruption: A state comes back as another one.
    """
    rows = []
    for size in sizes:
        check_room(COPIES, size, "a measurement takes")
        found: dict[str, list[float]] = {"stage": [], "save": [], "agent": [], "file": []}
        for number in range(rounds):
            for name, seconds in _once(size, number).items():
                found[name].append(seconds)
        through_file = [save + load for save, load in zip(found["save"], found["file"], strict=True)]
        times = {name: spread(seconds) for name, seconds in found.items()}
        fast = ratio(spread(through_file)["p50_ms"], times["agent"]["p50_ms"])
        rows.append({"bytes": size, "rounds": rounds, "times": times, "times_as_fast": fast})
        log.say(f"local, {size_name(size)}: {times['agent']['p50_ms']:.3g} ms, {fast:.3g} times as fast as a file")
    return rows


def _once(size: int, number: int) -> dict[str, float]:
    with scratch() as (stack, folder):
        env = {TOKEN_VARIABLE: secrets.token_hex(32)}
        agent = tied("ft_hsdp.state.agent.server", "--replica=0", "--host=127.0.0.1")
        spawn(stack, agent, folder / "agent.log", env)
        spec = {"nbytes": size, "file": str(folder / "state.safetensors"), "seed": number}
        module, arguments, log = "ft_hsdp.bench.recovery.local_rank", [json.dumps(spec)], folder / "rank.log"
        rank = partial(spawn_worker, stack, "a rank", module, arguments, log, env)
        first = rank()
        greet([first])
        (kept,) = ask([first], {"do": "keep"})
        first.close()
        second = rank()
        greet([second])
        ways = ("agent", "file") if number % 2 else ("file", "agent")
        got = {way: ask([second], {"do": way})[0] for way in ways}
    for way, answer in got.items():
        if answer["digest"] != kept["digest"]:
            raise DataCorruption(f"bench: the state that came back ({way}) is another one")
    return {"stage": kept["stage_s"], "save": kept["save_s"], **{way: got[way]["seconds"] for way in ways}}
