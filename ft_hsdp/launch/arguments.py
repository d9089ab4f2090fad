"""The commands of the command line, their options and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ft_hsdp.analysis.costs import ASSUMED, option
from ft_hsdp.errors import EXIT_CONFIG, FtHsdpError

BENCHES = ("ftar", "quorum", "fetch", "recovery", "overhead", "return", "hosts", "memory", "culprits")
MEASURES = (
    "of recovery: kill, torchft, stop; of memory: lost, union; or all; of quorum: agents; of overhead: profile"
)
BENCH_TIME = (
    "A checkout alone has them. On 2 quiet cores ftar takes about 6 minutes, and 15 GiB of memory; fetch 2, and "
    "10 GiB; quorum 1; recovery 7; overhead 8; return 3; memory 20"
)
ORDERS = {
    "evict": "end one replica's processes; it is started again",
    "drain": "have a replica leave after its step, or the ranks of a host move",
    "undrain": "let a drained replica come back, or a host have ranks",
    "checkpoint": "have the next step written as a durable checkpoint",
    "scale": "have the job go on with N replicas, from the next step on",
    "host-lost": "say that a machine is gone: its ranks count as ended",
}
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
OVERRIDES = "--dotted.key=value sets any key of the configuration; the value is YAML, e.g. --train.steps=60"


class _Usage(FtHsdpError):
    """The arguments are not those of a command."""

    exit_code = EXIT_CONFIG


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)
        self._action_max_length = 14  # the measure forgets how far commands are indented


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting with 2."""
        raise _Usage(f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; it puts the name of the command into ``command``."""
    parser = _Parser(
        prog="ft-hsdp",
        description="Fault-tolerant HSDP: replicas that come and go train one model.",
        epilog=OVERRIDES,
        allow_abbrev=False,
        formatter_class=_Help,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        command.set_defaults(command=name)
        return command

    def with_config(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("config", metavar="CONFIG", type=Path, help="the YAML file of the job")
        command.epilog = OVERRIDES
        return command

    def with_json(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
        return command

    def with_runs(command: argparse.ArgumentParser, run: str = "") -> argparse.ArgumentParser:
        command.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs are (runs)")
        if run:
            command.add_argument("run", metavar="RUN", help=run)
        return command

    a_run = "a run's name or folder"

    with_json(with_config(add("up", "lighthouse and all replicas on this machine, until done")))
    lighthouse = with_config(add("lighthouse", "the lighthouse of a job, by itself"))
    lighthouse.add_argument("--url", metavar="URL", help="where others reach it, if not where it listens")
    replica = with_config(add("replica", "one replica of a job, or one rank of it under torchrun"))
    replica.add_argument("--replica", type=int, required=True, metavar="ID", help="which one, from 0")
    replica.add_argument("--lighthouse", metavar="URL[,URL]", help="where it is, if not in the run directory")
    host = with_config(add("host", "the ranks that the lighthouse assigns to this machine"))
    host.add_argument("--lighthouse", metavar="URL[,URL]", help="where it is, if not in the run directory")
    for agent in (replica, host):  # their holder starts them again with it
        agent.add_argument("--holder", type=int, help=argparse.SUPPRESS)
        agent.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    status = with_runs(with_json(add("status", "the running job: steps, replicas, ranks, pids")))
    status.add_argument("name", metavar="RUN", nargs="?", help="a run's name or folder (the newest that runs)")
    status.add_argument("--run", metavar="RUN", help="the same, by an option")
    status.add_argument("--ray-address", metavar="A", help="of a Ray cluster: auto, or HOST:PORT of its head")
    submit = with_json(with_config(add("submit", "the same job on a Ray cluster")))
    submit.add_argument(
        "--ray-address",
        metavar="A",
        default="auto",
        help="auto (default) or HOST:PORT of its head, on a node of it; http://HOST:8265 from elsewhere",
    )
    render = add("render", "the same job as a file for Slurm or Kubernetes, on stdout")
    _declare_render(render, with_config)
    chaos = with_runs(with_json(add("chaos", "injure a running job: signals, hosts, networks, ...")), a_run)
    chaos.add_argument("--kind", default="signal", help="what goes wrong (signal); docs/chaos.md has the kinds")
    chaos.add_argument("--replica", type=int, metavar="ID")
    chaos.add_argument("--rank", type=int, metavar="RANK", help="0, or all: see docs/chaos.md")
    chaos.add_argument("--host", metavar="NAME", help="with kind host: the host, in place of a rank")
    chaos.add_argument("--target", metavar="WHAT", help="fork_server, agent, supervisor or lighthouse")
    chaos.add_argument("--edge", metavar="A,B", help="with partition: two replicas, or one and lighthouse")
    chaos.add_argument("--signal", choices=["KILL", "STOP", "TERM"], default="KILL", help="KILL by default")
    chaos.add_argument("--for-s", type=float, default=0.0, metavar="S", help="lift it after S s (0: never)")
    chaos.add_argument("--reject", action="store_true", help="with partition: refuse connections")
    bench = with_json(add("bench", "the figures, beside their anchors"))
    bench.add_argument("what", nargs="+", choices=BENCHES)
    bench.add_argument("--measure", metavar="WHAT", help=MEASURES)
    bench.add_argument("--sizes", metavar="LIST", help="of messages or states, e.g. 64KiB,1MiB")
    bench.add_argument("--members", metavar="LIST", help="ring sizes, e.g. 2,4")
    bench.add_argument("--contenders", metavar="LIST", help="tcp,shm,c10d,gloo,torchft")
    bench.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="of what is interleaved: 20; fetch 7; quorum 300; overhead 70",
    )
    kills = "how many: recovery 200; return 12; memory 20"
    bench.add_argument("--kills", type=int, metavar="N", help=kills)
    bench.epilog = BENCH_TIME
    doctor = with_json(with_config(add("doctor", "preflight: what would stop the job, and what to do")))
    doctor.add_argument("--lighthouse", metavar="URL[,URL]", help="the lighthouses, if they are elsewhere")
    doctor.add_argument("--ray", action="store_true", help="the job runs on Ray, which must be installed")
    doctor.add_argument("--ray-address", metavar="ADDRESS", help="also examine this cluster: HOST:PORT, or auto")
    sdc = with_json(add("sdc-check", "does this host compute the same bits each time"))
    sdc.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="the YAML file of the job")
    sdc.epilog = OVERRIDES
    sdc.add_argument("--steps", type=int, metavar="N", help="that each rank trains, twice (16)")
    sdc.add_argument("--together", action="store_true", help="as one replica, not each rank alone")
    hosts = "what --json has written on several hosts: which is an outlier"
    sdc.add_argument("--compare", metavar="FILE", nargs="+", type=Path, help=hosts)
    study = with_json(add("study", "train one job with many histories of failures, and compare"))
    study.add_argument("file", metavar="FILE", type=Path, help="what to vary, e.g. configs/study.yaml")
    study.add_argument("--jobs", type=int, metavar="N", help="variants at once (as many as fit on the cores)")
    plan = with_json(with_config(add("plan", "who keeps which shard, how safe that is, and what it costs")))
    plan.add_argument(
        "--hosts", type=int, metavar="N", help="of each replica, if hosts.per_replica does not say it"
    )
    plan.add_argument("--parameters", type=float, metavar="N", help="of the model, if the configuration does not")
    for name, each in ASSUMED.items():
        text = f"{each.metadata['help']} (%(default)g)"
        plan.add_argument(option(name), type=float, metavar="X", default=each.default, help=text)
    add("schema", "the JSON Schema of a configuration, for editors")
    example = add("example", "an example configuration; without NAME, what there is")
    example.add_argument("name", metavar="NAME", nargs="?", help="e.g. quickstart; write it into a file for `up`")
    replay = with_runs(with_json(add("replay", "a recorded run: train it again and compare; its page")), a_run)
    replay.add_argument(
        "--page", action="store_true", help="only the page; on a terminal it also follows the check"
    )
    replay.add_argument("--port", type=int, default=0, metavar="N", help="of the page (a free one)")
    diagnose = with_runs(with_json(add("diagnose", "who keeps a running job waiting")))
    about = "a run's name or folder (the newest that runs), or a file that --dump wrote"
    diagnose.add_argument("name", metavar="RUN", nargs="?", help=about)
    diagnose.add_argument("--dump", metavar="FILE", type=Path, help="write what the ranks told into a file")
    with_runs(with_json(add("explain", "what happened in a run, and why")), a_run)
    goodput = with_runs(with_json(add("goodput", "how much of the time trains: predicted, and measured in a run")))
    goodput.add_argument("config", metavar="CONFIG|RUN", type=Path, nargs="?", help="a YAML file, or a run")
    goodput.add_argument("--phases", metavar="FILE", type=Path, help="`goodput RUN --json` of another run")
    goodput.add_argument("--plot", metavar="FILE", type=Path, help="draw what a restart is made of: SVG, PNG, ...")
    goodput.epilog = OVERRIDES
    with_runs(with_json(add("verify", "a finished run: does the protocol allow what it logged")), a_run)
    locate = with_runs(with_json(add("locate", "the rank and host that held an element of a parameter")), a_run)
    locate.add_argument("--parameter", metavar="NAME", required=True, help="as in the model's state_dict")
    locate.add_argument("--index", metavar="I", help="of the element: I in row-major order, or I,J,K (all ranks)")
    locate.add_argument("--step", type=int, metavar="S", help="at this step (at all)")
    trace = with_runs(add("trace", "a run as a trace for ui.perfetto.dev"), a_run)
    trace.add_argument("out", metavar="OUT", type=Path, nargs="?", help="a file (trace.json in the run's folder)")
    for name, text in ORDERS.items():
        command = with_runs(add(name, text), "a running job's name or folder")
        command.set_defaults(replica=None, replicas=None, force=False, host="")
        if name == "scale":
            command.add_argument("replicas", type=int, metavar="N", help="from 1 to max_replicas")
        if name == "host-lost":
            command.add_argument("host", metavar="HOST", help="its name, as `status` shows it")
        command.add_argument("--reason", default="", help="for the journal")
        if name in ("evict", "drain", "undrain"):
            what = command.add_mutually_exclusive_group(required=True)
            what.add_argument("--replica", type=int, metavar="ID")
            if name != "evict":
                what.add_argument("--host", metavar="HOST", help="its name, as `status` shows it")
        if name in ("drain", "scale"):
            even = "even below quorum.min_replicas" + (", or without a spare host" if name == "drain" else "")
            command.add_argument("--force", action="store_true", help=even)
    export = with_runs(with_json(add("export", "a checkpoint's model in safetensors")))
    export.add_argument("source", metavar="CHECKPOINT_DIR", help="checkpoint.dir, a checkpoint in it, or a run")
    export.add_argument("out", metavar="OUT", type=Path, help="a new FILE.safetensors; the built-in model: folder")
    export.add_argument("--step", type=int, metavar="N", help="which one (the newest)")
    export.add_argument("--key", metavar="FILE", help="the job's checkpoint.key (yours)")
    export.add_argument("--trust", action="store_true", help="accept a folder of any writer: no key is asked for")
    export.add_argument(
        "--base", metavar="PATH", type=Path, help="safetensors with the frozen weights and buffers"
    )
    return parser


def _declare_render(
    render: argparse.ArgumentParser, with_config: Callable[[argparse.ArgumentParser], Any]
) -> None:
    """Add the targets of `render` as its subcommands; ``with_config`` adds CONFIG to one."""
    targets = render.add_subparsers(title="targets", metavar="TARGET", required=True, dest="target")
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
