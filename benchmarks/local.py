"""`bench local`: a killed rank's state from its host's memory, beside the usual way through a file (safetensors).

`python -m benchmarks.local FD SPEC` is a rank with a state:

    -> {"do": "keep"}      <- {"stage_s": 0.1, "save_s": 0.2, "digest": "..."}   into the state agent, and a file
    -> {"do": "agent"}     <- {"seconds": 0.1, "digest": "..."}                  from the state agent
    -> {"do": "file"}      <- {"seconds": 0.1, "digest": "..."}                  from the safetensors file

Both ways end with the values in the tensors of a rank that has just been started.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
import xxhash
from safetensors.torch import load_file, save_file

from ft_hsdp.bench.command import MIB, rounds_of, sizes_of
from ft_hsdp.bench.processes import Answer, Obey, ask, greet, run_worker, scratch, spawn, spawn_worker
from ft_hsdp.bench.results import (
    ProgressLog,
    ResultRow,
    Verdicts,
    begin_result,
    check_room,
    finish_result,
    least,
    ratio,
    size_name,
    spread,
)
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import DataCorruption
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.secret import TOKEN_VARIABLE
from ft_hsdp.state.agent.client import StateAgent
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.shard_manifest import ShardManifest

STATE = StateId(1, 1, "0" * 32)
TENSORS = 32
DEADLINE_S = 30.0
COPIES = 6  # of a state in memory at once: two ranks, the agent, the file, and while it is saved and loaded
LOCAL_TIMES = 5.0  # the goal


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What `bench local` measures."""

    sizes: tuple[int, ...]  # of states, in bytes
    rounds: int


def options(args: Namespace) -> LocalOptions:
    """Return what `bench local` is to do."""
    return LocalOptions(sizes_of(args) or (256 * MIB,), rounds_of(args, 5))


def goals(result: Mapping[str, Any]) -> Verdicts:
    """Yield the verdicts on a result of `bench local`."""
    for row in result["local"]:
        yield least("from the agent vs save + load, times as fast", row, LOCAL_TIMES, row["times_as_fast"])


def run(options: LocalOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A process fails.
        DataCorruption: A state comes back as another one.
    """
    log = ProgressLog(stream)
    result, started = begin_result("local", log)
    result["local"] = local(options.sizes, options.rounds, log)
    return finish_result(result, goals(result), log, started)


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
        module, arguments, log = "benchmarks.local", [json.dumps(spec)], folder / "rank.log"
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


class LocalRank:
    """Holds the state in tensors of about equal size."""

    def __init__(self, nbytes: int, file: str, seed: int) -> None:
        self._nbytes = nbytes
        self._file = file
        self._seed = seed  # of the values
        whole = nbytes // 4
        sizes = [whole // TENSORS + (n < whole % TENSORS) for n in range(TENSORS)]
        self.state = {f"{n:02}": torch.ones(size) for n, size in enumerate(sizes)}  # every page is there

    def obey(self, command: Mapping[str, Any]) -> Answer:
        """Do one thing; return the answer."""
        if command["do"] == "keep":
            return self._keep()
        start = time.monotonic()
        if command["do"] == "agent":
            self._from_agent()
        else:
            self._from_file()
        return {"seconds": time.monotonic() - start, "digest": self._digest()}

    def _keep(self) -> Answer:
        random = torch.Generator().manual_seed(self._seed)
        for tensor in self.state.values():
            tensor.uniform_(generator=random)
        agent = self._connect()
        start = time.monotonic()
        memory = agent.stage(STATE)
        assert memory is not None
        for part, place in self._parts():
            memory[place] = part
        manifest = ShardManifest(STATE, 0, 1, shard_manifest.fingerprint(()), self._nbytes, (), (), ())
        agent.staged(STATE, shard_manifest.encode(shard_manifest.seal(manifest, memory.data)))
        agent.mark_settled(STATE)
        staged = time.monotonic()
        save_file(self.state, self._file)
        return {"stage_s": staged - start, "save_s": time.monotonic() - staged, "digest": self._digest()}

    def _from_agent(self) -> None:
        agent = self._connect()
        (held,) = [h for h in agent.list() if h.settled]
        taken = agent.acquire(held.state)
        assert taken is not None
        memory, _ = taken
        for part, place in self._parts():
            part[:] = memory[place]

    def _from_file(self) -> None:
        loaded = load_file(self._file)
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def _connect(self) -> StateAgent:
        return StateAgent.connect(os.environ[TOKEN_VARIABLE], 0, 0, 1, self._nbytes, DEADLINE_S)

    def _digest(self) -> str:
        total = xxhash.xxh3_128()
        for part, _ in self._parts():
            total.update(part)
        return total.hexdigest()

    def _parts(self) -> Iterator[tuple[Any, slice]]:
        """Yield the bytes of each tensor, uint8, and their place where all tensors are in a row."""
        at = 0
        for tensor in self.state.values():
            part = tensor.view(torch.uint8).numpy()
            yield part, slice(at, at + len(part))
            at += len(part)


def set_up() -> tuple[Answer, Obey]:
    """Allocate the tensors of the state."""
    torch.set_num_threads(1)
    return {}, LocalRank(**json.loads(sys.argv[2])).obey


if __name__ == "__main__":
    run_worker(set_up)
