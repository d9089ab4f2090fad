"""`bench overhead`: runs the measures and puts the result together."""

from __future__ import annotations

from typing import Any, TextIO

from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.hsdp.measure import measure as link
from ft_hsdp.bench.hsdp.scene import Scene
from ft_hsdp.bench.overhead.goals import verdicts
from ft_hsdp.bench.overhead.options import Options
from ft_hsdp.bench.overhead.snapshot import snapshot
from ft_hsdp.bench.overhead.steady import steady
from ft_hsdp.bench.plan import Log


def run(options: Options, stream: TextIO) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`. Raises Retryable where a process fails."""
    log = Log(stream)
    result, started = begin("overhead", log)
    wanted = options.measures
    result["steady"] = steady(options.rounds, log) if "steady" in wanted else []
    result["snapshot"] = snapshot(options.rounds, log) if "snapshot" in wanted else []
    result["link"] = link(Scene(rounds=options.rounds), log) if "link" in wanted else []
    return finish(result, verdicts(result), log, started)
