"""`render TARGET CONFIG`: the options of each target, and what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from ft_hsdp.config import Config

TARGETS = {
    "slurm": "an sbatch array, one element per replica or machine: `bash FILE` submits it with its lighthouse",
    "jobset": "a Kubernetes JobSet: a lighthouse, and a Job per replica or machine",
    "rayjob": "a Kubernetes RayJob: `submit` on a Ray cluster of its own",
}
SIZES = (
    ("--nodes-per-replica", "nodes", None, "nodes of a replica (hosts.per_replica, or 1)"),
    ("--cpus-per-rank", "cpus", None, "processors of a rank (train.threads)"),
    ("--gpus-per-rank", "gpus", None, "GPUs of a rank (1 with cuda, else 0)"),
)


def declare(parser: argparse.ArgumentParser, with_config: Callable[[argparse.ArgumentParser], Any]) -> None:
    """Add the targets as subcommands.

    Args:
        parser: Of `render`.
        with_config: Adds CONFIG to a command.
    """
    targets = parser.add_subparsers(title="targets", metavar="TARGET", required=True, dest="target")
    for name, text in TARGETS.items():
        target = targets.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        with_config(target)
        if name == "slurm":
            target.add_argument("--partition", metavar="NAME", help="as for sbatch")
            target.add_argument("--account", metavar="NAME", help="as for sbatch")
            target.add_argument(
                "--time", metavar="TIME", help="as for sbatch: limit of one element, which is then requeued"
            )
            target.add_argument("--python", metavar="FILE", help="on all nodes (the one that runs this command)")
        else:
            target.add_argument("--image", metavar="IMAGE", required=True, help="image that contains ft_hsdp")
            target.add_argument("--namespace", metavar="NAME", help="namespace of all objects (that of kubectl)")
            target.add_argument(
                "--claim",
                metavar="NAME",
                help="volume claim that all pods mount at /runs (a new one, for the lighthouse only)",
            )
        if name == "jobset":
            target.add_argument(
                "--secret", metavar="NAME", help="Secret with the key token (the job's name and -token)"
            )
        target.add_argument("--memory-gib", type=int, metavar="N", help="memory of a node (the site's default)")
        if name != "rayjob":  # a rayjob takes these from the section `ray`
            for option, field, default, text in SIZES:
                target.add_argument(option, dest=field, type=int, default=default, metavar="N", help=text)


def render(config: Config, args: argparse.Namespace) -> str:
    """Return the file for the target and the options in `args`.

    Raises:
        ConfigError: The target cannot run this configuration, or refuses an option.
    """
    from ft_hsdp.launch.render.jobset import jobset
    from ft_hsdp.launch.render.rayjob import rayjob
    from ft_hsdp.launch.render.settings import Site
    from ft_hsdp.launch.render.slurm import slurm

    given = {field: getattr(args, field, None) for field in Site.__dataclass_fields__}
    site = Site(**{"python": sys.executable, **{field: v for field, v in given.items() if v is not None}})
    return {"slurm": slurm, "jobset": jobset, "rayjob": rayjob}[args.target](config, site)
