"""The benches by name: from the words of a command line to a result."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, TextIO

from ft_hsdp.bench import options
from ft_hsdp.bench.results import GIB


def run_bench(name: str, args: Namespace, stream: TextIO) -> dict[str, Any]:
    """Run one bench.

    Args:
        name: of the bench, as on the command line.
        args: the words of the command line.
        stream: where progress goes.

    Returns:
        The result, ready for JSON.

    Raises:
        ConfigError: The words, or this machine, do not allow it.
        Retryable: A process fails.
        DataCorruption: A sum or a state is wrong.
        ValueError: No bench has this name.
    """
    # A bench imports what it measures, so each is imported only when it runs.
    match name:
        case "ftar":
            from ft_hsdp.bench import allreduce

            return allreduce.run(options.ftar_options(args), stream)
        case "quorum":
            from ft_hsdp.bench import quorum_rounds

            return quorum_rounds.run(options.quorum_options(args), stream)
        case "fetch":
            from ft_hsdp.bench import state_fetch

            return state_fetch.run(options.fetch_options(args), stream)
        case "recovery":
            from ft_hsdp.bench.recovery import bench

            return bench.run(options.recovery_options(args), stream)
        case "overhead":
            from ft_hsdp.bench import overhead

            return overhead.run(options.overhead_rounds(args), stream)
        case "strangers":
            from ft_hsdp.bench import strangers

            return strangers.run(options.rounds_of(args, 6), stream)
        case "tls":
            from ft_hsdp.bench import tls

            sizes = options.sizes_of(args.sizes) or (GIB,)
            return tls.run(options.rounds_of(args, 9), sizes[0], stream)
        case "driver":
            from ft_hsdp.bench import driver

            return driver.measure(driver.STEPS if args.rounds is None else args.rounds, stream)
    raise ValueError(name)
