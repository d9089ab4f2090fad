"""`bench overhead`: runs the measures and puts the result together."""

from __future__ import annotations

from typing import Any, TextIO

from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.overhead.goals import verdicts
from ft_hsdp.bench.overhead.options import Options
from ft_hsdp.bench.overhead.ray import ray
from ft_hsdp.bench.overhead.snapshot import snapshot
from ft_hsdp.bench.overhead.steady import steady
from ft_hsdp.bench.plan import Log


def run(options: Options, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`. Raises Retryable where a process fails."""
    log = Log(stream)
    result, started = begin("overhead", log)
    rounds = options.rounds  # of the measures that are wanted
    result["steady"] = steady(rounds["steady"], log) if "steady" in rounds else []
    result["snapshot"] = snapshot(rounds["snapshot"], log) if "snapshot" in rounds else []
    result["ray"] = ray(rounds["ray"], log) if "ray" in rounds else []
    result["link"] = link(Scene(rounds=rounds["link"]), log) if "link" in rounds else []
    return finish(result, verdicts(result), log, started)
