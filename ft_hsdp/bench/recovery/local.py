"""A killed rank's state from the memory of its host, beside the usual way through a file (safetensors)."""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ft_hsdp.bench.options import ProgressLog, ResultRow, size_name
from ft_hsdp.bench.results import check_room, ratio, spread
from ft_hsdp.errors import DataCorruption, Retryable
from ft_hsdp.launch.backend.processes import environment, last_line, tied
from ft_hsdp.secret import TOKEN_VARIABLE

FOLDS = 6  # times a state is in memory at once: two ranks, the agent, the file, and while it is saved and loaded


def local(sizes: Sequence[int], rounds: int, log: ProgressLog) -> list[ResultRow]:
    """A row for each size: after SIGKILL of a rank, `rounds` times each way.

    The clock starts when the next rank has its imports and its tensors.

    Raises Retryable where a process fails, DataCorruption where a state comes back as another one.
    """
    rows = []
    for size in sizes:
        check_room(FOLDS, size, "a measurement takes")
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
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        token = secrets.token_hex(32)
        agent = stack.enter_context(
            _process(folder, token, "ft_hsdp.state.agent.server", "--replica=0", "--host=127.0.0.1")
        )
        agent.answer()
        seat = {"token": token, "nbytes": size, "file": str(folder / "state.safetensors"), "seed": number}
        command = "ft_hsdp.bench.recovery.local_rank", json.dumps(seat)
        with _process(folder, token, *command) as first:
            first.answer()
            kept = first.ask("keep")
        with _process(folder, token, *command) as second:  # the first one was killed
            second.answer()
            ways = ("agent", "file") if number % 2 else ("file", "agent")
            got = {way: second.ask(way) for way in ways}
    for way, answer in got.items():
        if answer["digest"] != kept["digest"]:
            raise DataCorruption(f"bench: the state that came back ({way}) is another one")
    return {"stage": kept["stage_s"], "save": kept["save_s"], **{way: got[way]["seconds"] for way in ways}}


class _Process:
    """A process that answers on stdout, a JSON line each."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def ask(self, order: str) -> dict[str, Any]:
        """Have it do something. Raises Retryable if it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the process's next answer, and return it."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Retryable(f"bench: a process ended: {last_line(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def _process(folder: Path, token: str, *module_and_args: str) -> Iterator[_Process]:
    """Start a process; SIGKILL at the end."""
    file = folder / "log"
    with file.open("ab") as log:
        process = subprocess.Popen(
            tied(*module_and_args),
            env={**environment(), TOKEN_VARIABLE: token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with process:
        try:
            yield _Process(process, file)
        finally:
            process.kill()
