"""`bench recovery`: runs the measures and puts the result together."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any, TextIO

from ft_hsdp.bench.document import begin, finish
from ft_hsdp.bench.plan import Log
from ft_hsdp.bench.recovery.goals import verdicts
from ft_hsdp.bench.recovery.kills import kills
from ft_hsdp.bench.recovery.local import local
from ft_hsdp.bench.recovery.options import Options
from ft_hsdp.bench.recovery.peer import KILLED, STOPPED, peer
from ft_hsdp.bench.recovery.readers import readers
from ft_hsdp.bench.recovery.returns import returns
from ft_hsdp.bench.recovery.scene import Scene
from ft_hsdp.bench.recovery.stops import MOST, stops

LONG_S = (
    0.4  # of waiting in the steps beside which a rejoin is measured again: what it costs is no matter of steps
)
LONG_KILLS = 10


def run(options: Options, stream: TextIO, scene: Scene | None = None) -> dict[str, Any]:
    """The result, ready for JSON; progress goes to `stream`. `scene` is trained while replicas are killed.

    Raises ConfigError where the machine does not allow what is asked, Retryable where a process fails,
    DataCorruption where a state comes back as another one.
    """
    log, scene = Log(stream), scene or Scene()
    result, started = begin("recovery", log)
    wanted = options.measures
    result["kill"] = kills(scene, options.kills, log) if "kill" in wanted else []
    result["torchft"] = peer(scene, options.kills, log, KILLED, signal.SIGKILL) if "torchft" in wanted else []
    if "rejoin" in wanted:
        result["rejoin"] = kills(replace(scene, wait_s=LONG_S), min(options.kills, LONG_KILLS), log)
    else:
        result["rejoin"] = []
    result["return"] = returns(options.kills, log) if "return" in wanted else []
    stopped = min(options.kills, MOST) if "stop" in wanted else 0
    result["stop"] = stops(scene, stopped, log) if stopped else []
    result["torchft_stop"] = peer(scene, stopped, log, STOPPED, signal.SIGSTOP) if stopped else []
    result["readers"] = readers(options.rounds, log) if "readers" in wanted else []
    result["local"] = local(options.sizes, options.rounds, log) if "local" in wanted else []
    return finish(result, verdicts(result), log, started)
