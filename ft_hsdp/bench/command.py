"""The benches by name; a module is imported when its bench runs, because it imports what it measures."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, TextIO

from ft_hsdp.errors import ConfigError

BENCHES: Mapping[str, str] = {
    "ftar": "ft_hsdp.bench.allreduce",
    "quorum": "ft_hsdp.bench.quorum",
    "fetch": "ft_hsdp.bench.state_fetch",
    "recovery": "ft_hsdp.bench.recovery.bench",
    "overhead": "ft_hsdp.bench.overhead",
    # A checkout has these, beside the package.
    "rings": "benchmarks.rings",
    "link": "benchmarks.link",
    "return": "benchmarks.returns",
    "readers": "benchmarks.readers",
    "local": "benchmarks.local",
    "ray": "benchmarks.under_ray",
    "units": "benchmarks.units",
    "adopt": "benchmarks.adopt",
    "memory": "benchmarks.memory",
    "flips": "benchmarks.flips",
    "lone": "benchmarks.lone",
    "losses": "benchmarks.losses",
}

# What was here before, and what has taken its place.
MOVED_MEASURES: Mapping[tuple[str, str], str] = {
    **{("ftar", each): f"bench rings --measure {each}" for each in ("kill", "reconfigure")},
    **{(each, "link"): "bench link" for each in ("ftar", "overhead")},
    **{("recovery", each): f"bench {each}" for each in ("return", "readers", "local")},
    ("overhead", "ray"): "bench ray",
    ("memory", "flips"): "bench flips",
}
GONE = "it is gone; docs/measurements.md has its last figures"
GONE_MEASURES = {
    *(("memory", each) for each in ("none", "plan", "gaps", "step")),
    *((each, "spin") for each in ("ftar", "rings")),
    ("recovery", "rejoin"),
}
GONE_BENCHES: Mapping[str, str] = {
    "width": "it is gone; in its place: bench lone, bench losses",
    **dict.fromkeys(("strangers", "tls", "driver"), GONE),
}


def bench_name(word: str) -> str:
    """Return the name of a bench as it was given. Raises ArgumentTypeError for one that is gone."""
    if word in GONE_BENCHES:
        raise ArgumentTypeError(f"bench {word}: {GONE_BENCHES[word]}")
    return word


def refuse_gone(names: Sequence[str], args: Namespace) -> None:
    """Raise ConfigError for a measure or an option that the named benches had once; the error says what to use."""
    for name in names:
        if (moved := MOVED_MEASURES.get((name, args.measure))) is not None:
            raise ConfigError("--measure", args.measure, f"others with bench {name}; this one is now: {moved}")
        if (name, args.measure) in GONE_MEASURES:
            raise ConfigError("--measure", args.measure, f"others with bench {name}; {GONE}")
    if set(names) == {"recovery"} and args.rounds is not None:
        allowed = "nothing with bench recovery; it is an option of bench readers and bench local"
        raise ConfigError("--rounds", args.rounds, allowed)
    if set(names) == {"recovery"} and args.sizes is not None:
        raise ConfigError("--sizes", args.sizes, "nothing with bench recovery; it is an option of bench local")


def run_bench(name: str, args: Namespace, stream: TextIO) -> dict[str, Any]:
    """Run one bench, as the words of the command line say; progress goes to ``stream``.

    Returns:
        The result, ready for JSON.

    Raises:
        ConfigError: The words, or this machine, do not allow it, or only a checkout has this bench.
        Retryable: A process fails.
        DataCorruption: A sum or a state is wrong.
    """
    try:
        module = import_module(BENCHES[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "benchmarks":
            raise
        here = ", ".join(each for each, path in BENCHES.items() if path.startswith("ft_hsdp."))
        allowed = f"{here}; this one is in the repository: python launcher.py bench {name}"
        raise ConfigError("bench", name, allowed) from None
    result: dict[str, Any] = module.run(module.options(args), stream)
    return result
