"""`sdc-check`: does this host compute the same bits each time, and the same as others (FT-HSDP §2.2).

The ranks that a replica has on one host train a few steps of the configured job twice, without a lighthouse and
without other hosts. Each does so alone, on the same weights and data, so that a device that is wrong is found by
its number. A model that needs several devices is trained by all of them together; then a wrong sum is found, but
not which rank made it. `analysis.outliers` judges what they have found, and compares hosts.

`python -m ft_hsdp.launch.sdc_check FOLDER STEPS PASS` is one rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ft_hsdp
from ft_hsdp.analysis import outliers
from ft_hsdp.config import Config, config_hash, dump, load, parse
from ft_hsdp.config.entry import stamped
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.backend import entry
from ft_hsdp.launch.backend.processes import tied
from ft_hsdp.launch.run.replay import free_ports, place, run_ranks
from ft_hsdp.lifetime import leave
from ft_hsdp.train.device import describe
from ft_hsdp.train.identity import host_name
from ft_hsdp.train.replay.trial import Trial

PASSES = 2
STEPS = 16  # unless the job has fewer
SAME = ("version", "config", "together", "steps", "data")  # of documents that can be compared


def check(config: Config, steps: int | None, together: bool) -> dict[str, Any]:
    """Try this host. Blocks for as long as the steps take, twice.

    Args:
        steps: How many; None: `STEPS`.
        together: Whether the ranks of this host are one replica; else each trains alone.

    Returns:
        The host's JSON document.

    Raises:
        ConfigError: The job cannot be trained here, or has fewer steps.
        Retryable: A rank has ended otherwise; a broken host may do that, too.
    """
    most = config.train.steps
    steps = min(STEPS, most) if steps is None else steps
    if not 1 <= steps <= most:
        raise ConfigError("--steps", steps, f"1 to train.steps ({most})")
    if config.ranks_per_unit > 1 and not together:
        raise ConfigError("ranks_per_unit", config.ranks_per_unit, "1, as each rank trains alone; or --together")
    count = config.ranks_per_replica // (config.hosts.per_replica or 1)
    describe(config.train.device, count)
    config = _tried(config, count if together else 1)
    with tempfile.TemporaryDirectory(prefix="ft_hsdp-sdc-check-") as name:
        passes = [_pass(config, Path(name), number, steps, count) for number in range(PASSES)]
    about = {"host": host_name(os.environ), "version": ft_hsdp.__version__, "steps": steps}
    return outliers.judge(about | {"config": config_hash(stamped(config))}, passes, together)


def _tried(config: Config, ranks: int) -> Config:
    """Return the configuration of one replica of so many ranks on this host."""
    given = config.model_dump()
    given["train"]["deterministic"] = True
    given["memory"]["shrink_to"] = None
    given["hosts"] |= {"per_replica": None, "spare": 0}
    return parse({**given, "ranks_per_replica": ranks, "spares": 0, "chaos": []})


def _pass(config: Config, folder: Path, number: int, steps: int, count: int) -> list[dict[str, Any]]:
    """Have all ranks of this host train; return what each has found."""
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    ranks = config.ranks_per_replica
    ports = free_ports(count // ranks)
    places = {f"rank {slot}": place(slot % ranks, slot, ranks, ports[slot // ranks]) for slot in range(count)}
    failed = run_ranks(tied(__name__, str(folder), str(steps), str(number)), folder, places)
    if failed is not None:
        raise failed.error(config.job.name)
    try:
        return [json.loads(_outcome(folder, number, slot).read_bytes()) for slot in range(count)]
    except FileNotFoundError:
        allowed = "a job whose entry trains until job.batches ends"
        raise ConfigError("CONFIG", config.job.name, allowed) from None


def _outcome(folder: Path, number: int, slot: int) -> Path:
    return folder / f"pass-{number}-rank-{slot}.json"


def read(paths: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Read what several hosts have found.

    Returns:
        The documents by host, and a line for each file that is none, or that fits the first one not.
    """
    found: dict[str, dict[str, Any]] = {}
    refused: list[str] = []
    for path in paths:
        try:
            each = json.loads(path.read_bytes())
            name = f"{each['host']} ({path})" if each["host"] in found else each["host"]
            first = next(iter(found.values()), each)
            outliers.judge_all({name: each})
            differs = [key for key in SAME if each[key] != first[key]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            refused.append(f"{path}: no document of `sdc-check --json` ({type(error).__name__}: {error})")
            continue
        if differs:
            refused.append(f"{path}: not compared: another {', '.join(differs)} than {paths[0]}")
        else:
            found[name] = each
    return found, refused


def main(folder: Path, steps: int, number: int) -> int:
    """Run one rank; return its exit code."""
    slot = int(os.environ["LOCAL_RANK"])
    trial = Trial(steps, number, _outcome(folder, number, slot))
    return entry.main(load(folder / "config.yaml"), 0, folder, trial)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
