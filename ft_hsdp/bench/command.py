"""The benches by name; a module is imported when its bench runs, because it imports what it measures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
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
