"""The benches by name: from the words of a command line to a result and its tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Result = dict[str, Any]
Show = Callable[[Mapping[str, Any], TextIO], None]
Bench = Callable[[argparse.Namespace, TextIO], tuple[Result, Show]]


def ftar(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench ftar`. Raises ConfigError, Retryable, DataCorruption."""
    from ft_hsdp.bench.allreduce import run
    from ft_hsdp.bench.options import parse
    from ft_hsdp.bench.tables import show

    options = parse(
        args.measure or "bandwidth",
        sizes=args.sizes,
        members=args.members,
        contenders=args.contenders,
        rounds=_or(args.rounds, 20),
    )
    return run(options, stream), show


def recovery(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench recovery`. Raises ConfigError, Retryable, DataCorruption."""
    from ft_hsdp.bench.recovery.report import parse, run, show

    options = parse(args.measure or "all", kills=args.kills, rounds=_or(args.rounds, 5), sizes=args.sizes)
    return run(options, stream), show


def overhead(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench overhead`. Raises ConfigError, Retryable."""
    from ft_hsdp.bench.overhead.measures import parse, run, show

    return run(parse(args.measure, rounds=args.rounds), stream), show


def fetch(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench fetch`. Raises ConfigError, Retryable."""
    from ft_hsdp.bench.state_fetch import parse, run, show

    return run(parse(args.measure or "all", sizes=args.sizes, rounds=_or(args.rounds, 7)), stream), show


def quorum(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench quorum`. Raises ConfigError, Retryable."""
    from ft_hsdp.bench.quorum_rounds import quorum_options, run, show

    return run(quorum_options(members=args.members, rounds=_or(args.rounds, 300)), stream), show


def strangers(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench strangers`. Raises ConfigError, Retryable."""
    from ft_hsdp.bench.options import count_of
    from ft_hsdp.bench.strangers import run, show

    return run(count_of("--rounds", _or(args.rounds, 6)), stream), show


def tls(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench tls`. Raises ConfigError, Retryable, DataCorruption."""
    from ft_hsdp.bench.encrypted import STATE, run, show
    from ft_hsdp.bench.options import count_of, sizes_of

    sizes = sizes_of(args.sizes) or (STATE,)
    return run(count_of("--rounds", _or(args.rounds, 9)), sizes[0], stream), show


def driver(args: argparse.Namespace, stream: TextIO) -> tuple[Result, Show]:
    """`bench driver`: a month of `up`, without the training."""
    from ft_hsdp.bench.driver import STEPS, measure, show

    return measure(_or(args.rounds, STEPS), stream), show


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


BENCHES: Mapping[str, Bench] = {
    "ftar": ftar,
    "quorum": quorum,
    "fetch": fetch,
    "recovery": recovery,
    "overhead": overhead,
    "strangers": strangers,
    "tls": tls,
    "driver": driver,
}
