"""`bench quorum`: both lighthouses are asked by the same clients, round by round in turns."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.plan import Log, Row
from ft_hsdp.bench.quorum.contenders import Contender, Ours, Torchft
from ft_hsdp.bench.quorum.goals import verdicts
from ft_hsdp.bench.quorum.options import Options
from ft_hsdp.bench.roster import version
from ft_hsdp.bench.rounds import interleave
from ft_hsdp.bench.spread import milliseconds, spread
from ft_hsdp.errors import ConfigError

KINDS = {
    "torchft": "torchft's lighthouse (Rust, gRPC, no token, in memory): all members get the quorum",
    "same": "ft_hsdp's, tokens checked: the next step in the same epoch",
    "new": "ft_hsdp's, tokens checked: the ring broke: a new epoch, signed, on disk before all get it",
}


def run(options: Options, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`.

    Raises ConfigError without torchft, Retryable where a lighthouse fails.
    """
    if version("torchft") is None:
        raise ConfigError("bench", "quorum", "an installation with torchft, which it is measured beside")
    log = Log(stream)
    result, started = begin("quorum", log)
    result["kinds"] = KINDS
    result["rounds"] = [_measure(members, options.rounds, log) for members in options.members]
    return finish(result, verdicts(result["rounds"]), log, started)


def _measure(members: int, rounds: int, log: Log) -> Row:
    """A row: the times of all kinds of rounds with so many members."""
    log.say(f"{members} members")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-hsdp-bench-")))
        torchft, ours = Torchft(stack, folder, members), Ours(stack, folder, members)
        torchft.settle()
        ours.settle()
        kinds = {"torchft": _Watched(torchft, torchft.same)}
        kinds |= {"same": _Watched(ours, ours.same), "new": _Watched(ours, ours.new)}
        seconds = interleave(kinds, rounds)
    found = {kind: spread(values) for kind, values in seconds.items()}
    cpu = {kind: milliseconds(each.cpu_s / each.rounds) for kind, each in kinds.items()}
    for kind, each in found.items():
        log.say(f"  {kind}: {each['p50_ms']:.3g} ms, server's CPU {cpu[kind]:.2f} ms")
    return {"members": members, "rounds": found, "cpu_ms": cpu}


class _Watched:
    """Rounds of one kind, and the CPU that the server needs for them."""

    def __init__(self, server: Contender, take: Callable[[], float]) -> None:
        self.cpu_s = 0.0
        self.rounds = 0
        self._server = server
        self._take = take

    def __call__(self) -> float:
        """One round, in seconds."""
        before = self._server.cpu_s()
        seconds = self._take()
        self.cpu_s += self._server.cpu_s() - before
        self.rounds += 1
        return seconds
