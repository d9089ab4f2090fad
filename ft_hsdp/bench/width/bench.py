"""`bench width`: what it costs that replicas have different numbers of ranks."""

from __future__ import annotations

from typing import Any, TextIO

from ft_hsdp.bench.command import WidthOptions
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.results import ProgressLog
from ft_hsdp.bench.width.allreduce import allreduce
from ft_hsdp.bench.width.blocks import blocks, loads
from ft_hsdp.bench.width.lone import lone
from ft_hsdp.bench.width.losses import losses
from ft_hsdp.bench.width.pair import rate, shrink
from ft_hsdp.bench.width.reshape import reshape


def run(options: WidthOptions, stream: TextIO) -> dict[str, Any]:
    """Return the result, ready for JSON; progress goes to ``stream``.

    Raises:
        ConfigError: The machine does not allow what is asked.
        Retryable: A process fails.
        DataCorruption: A shard, a sum or a block is not what it should be.
    """
    log = ProgressLog(stream)
    result, started = begin_result("width", log)
    wanted = options.measures
    result["reshape"] = (
        [reshape(size, options.rounds, log) for size in options.sizes] if "reshape" in wanted else []
    )
    result["allreduce"] = (
        [allreduce(size, options.rounds, log) for size in options.gradients] if "allreduce" in wanted else []
    )
    result["blocks"] = blocks(log) if "blocks" in wanted else []
    result["loads"] = loads(options.rounds) if "blocks" in wanted else []
    result["rate"] = rate(log) if "rate" in wanted else []
    result["shrink"] = shrink(max(1, options.kills // 4), log) if "shrink" in wanted else []
    result["lone"] = lone(options.kills, log) if "lone" in wanted else []
    result["losses"] = losses(options.kills, log) if "losses" in wanted else []
    return finish_result(result, log, started)
