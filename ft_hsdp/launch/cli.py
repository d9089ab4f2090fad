"""The command line: `python launcher.py ...`, installed as `ft-hsdp`.

Bad input gets one line on stderr and its exit code, never a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ft_hsdp import secret
from ft_hsdp.config import Config, load
from ft_hsdp.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRYABLE, ConfigError, FtHsdpError
from ft_hsdp.launch.render import command as rendering
from ft_hsdp.launch.rundir import RunDir

INTERRUPTED = 130
BREACH = 1  # of `verify`
MEASURES = (
    "of ftar: bandwidth (default), spin, kill, reconfigure, link; of fetch: large, small; "
    "of recovery: kill, torchft, rejoin, return, stop, readers, local; "
    "of overhead: steady, snapshot, ray, link; or all"
)
BENCH_TIME = (
    "On 2 quiet cores ftar by default takes about 5 minutes, and 15 GiB of memory (all measures 12); "
    "fetch 2, and 10 GiB; quorum 1; recovery 12; overhead 20; strangers 2; tls 1"
)
ORDERS = {
    "evict": "end one replica's processes; it is started again",
    "drain": "have one replica leave after its step, and keep it away",
    "undrain": "let a drained replica come back",
    "checkpoint": "have the next step written as a durable checkpoint",
    "scale": "have the job go on with N replicas, from the next step on",
}
OVERRIDES = "--dotted.key=value sets any key of the configuration; the value is YAML, e.g. --train.steps=60"


class _Usage(FtHsdpError):
    """Arguments that cannot be understood."""

    exit_code = EXIT_CONFIG


class _Help(argparse.HelpFormatter):
    """Keeps a command and its help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26)
        self._action_max_length = 14  # the measure forgets how far commands are indented


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting with 2."""
        raise _Usage(f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except FtHsdpError as error:
        _complain(str(error) or type(error).__name__)
        return error.exit_code
    except KeyboardInterrupt:
        _complain("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read our output has left
        return EXIT_OK
    except OSError as error:  # a full disk, most likely: the same command may do better later
        _complain(f"{error.filename or 'this machine'}: {error.strerror or error}")
        return EXIT_RETRYABLE
    finally:
        _let_go()


def _main(argv: Sequence[str]) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    overrides = [word for word in rest if word.startswith("--") and "=" in word]
    strangers = [word for word in rest if word not in overrides]
    if strangers or (overrides and "config" not in args):
        parser.error(f"unrecognized arguments: {' '.join(strangers or overrides)}")
    args.overrides = overrides
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = _Parser(
        prog="ft-hsdp",
        description="Fault-tolerant HSDP: replicas that come and go train one model.",
        epilog=OVERRIDES,
        allow_abbrev=False,
        formatter_class=_Help,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        command.set_defaults(command=run)
        return command

    def with_config(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("config", metavar="CONFIG", type=Path, help="the YAML file of the job")
        command.epilog = OVERRIDES
        return command

    def with_json(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("--json", action="store_true", help="one JSON document on stdout, nothing else")
        return command

    def with_runs(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where runs are (runs)")
        return command

    with_json(with_config(add("up", "lighthouse and all replicas on this machine, until done", _up)))
    lighthouse = with_config(add("lighthouse", "the lighthouse of a job, by itself", _lighthouse))
    lighthouse.add_argument("--url", metavar="URL", help="where others reach it, if not where it listens")
    replica = with_config(add("replica", "one replica of a job, or one rank of it under torchrun", _replica))
    replica.add_argument("--replica", type=int, required=True, metavar="ID", help="which one, from 0")
    replica.add_argument("--lighthouse", metavar="URL[,URL]", help="where it is, if not in the run directory")
    status = with_runs(with_json(add("status", "the running job: steps, replicas, ranks, pids", _status)))
    status.add_argument("--run", metavar="RUN", help="a run's name or folder (the newest that runs)")
    status.add_argument("--ray-address", metavar="A", help="of a Ray cluster: auto, or HOST:PORT of its head")
    submit = with_json(with_config(add("submit", "the same job on a Ray cluster", _submit)))
    submit.add_argument(
        "--ray-address",
        metavar="A",
        default="auto",
        help="auto (default) or HOST:PORT of its head, on a node of it; http://HOST:8265 from elsewhere",
    )
    render = add("render", "the same job as a file for Slurm or Kubernetes, on stdout", _render)
    rendering.declare(render, with_config)
    chaos = with_runs(with_json(add("chaos", "injure a running job: signals, disks, networks, ...", _chaos)))
    chaos.add_argument("run", metavar="RUN", help="a run's name or folder")
    chaos.add_argument("--kind", default="signal", help="what goes wrong (signal); docs/chaos.md has the kinds")
    chaos.add_argument("--replica", type=int, metavar="ID")
    chaos.add_argument("--rank", type=int, metavar="RANK", help="0, or all: see docs/chaos.md")
    chaos.add_argument("--target", metavar="WHAT", help="fork_server, agent, supervisor or lighthouse")
    chaos.add_argument("--edge", metavar="A,B", help="with partition: two replicas, or one and lighthouse")
    chaos.add_argument("--signal", choices=["KILL", "STOP", "TERM"], default="KILL", help="KILL by default")
    chaos.add_argument("--for-s", type=float, default=0.0, metavar="S", help="lift it after S s (0: never)")
    chaos.add_argument("--by-s", type=float, default=3600.0, metavar="S", help="with clock: how far it jumps")
    chaos.add_argument("--delay-s", type=float, default=0.2, metavar="S", help="with slow_disk: of each write")
    chaos.add_argument("--reject", action="store_true", help="with partition: refuse connections")
    bench = with_json(add("bench", "the figures, beside their anchors", _bench))
    kinds = ["ftar", "quorum", "fetch", "recovery", "overhead", "strangers", "tls", "driver"]
    bench.add_argument("what", nargs="+", choices=kinds)
    bench.add_argument("--measure", metavar="WHAT", help=MEASURES)
    bench.add_argument("--sizes", metavar="LIST", help="of messages or states, e.g. 64KiB,1MiB")
    bench.add_argument("--members", metavar="LIST", help="ring sizes, e.g. 2,4")
    bench.add_argument("--contenders", metavar="LIST", help="tcp,shm,shm-any,c10d,gloo,torchft,openmpi")
    bench.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="of what is interleaved: 20; recovery 5; quorum 300; overhead 70 (steady), 30 (snapshot), 6 (ray); "
        "strangers 6; tls 9; driver 1000000 (steps)",
    )
    bench.add_argument("--kills", type=int, default=200, metavar="N", help="recovery: how many, 200 by default")
    bench.epilog = BENCH_TIME
    bench.set_defaults(name="bench")
    doctor = with_json(with_config(add("doctor", "preflight: what would stop the job, and what to do", _doctor)))
    doctor.add_argument("--lighthouse", metavar="URL[,URL]", help="where it is, if not on this machine")
    doctor.add_argument("--ray", action="store_true", help="Ray must be here")
    doctor.add_argument("--ray-address", metavar="ADDRESS", help="a cluster to look at: HOST:PORT, or auto")
    add("schema", "the JSON Schema of a configuration, for editors", _schema)
    replay = with_runs(with_json(add("replay", "a recorded run: train it again and compare; its page", _replay)))
    replay.add_argument("run", metavar="RUN", help="a run's name or folder")
    replay.add_argument(
        "--page", action="store_true", help="only the page; on a terminal it also follows the check"
    )
    replay.add_argument("--port", type=int, default=0, metavar="N", help="of the page (a free one)")
    explain = with_runs(with_json(add("explain", "what happened in a run, and why", _explain)))
    explain.add_argument("run", metavar="RUN", help="a run's name or folder")
    verify = with_runs(with_json(add("verify", "a finished run: does the protocol allow what it logged", _verify)))
    verify.add_argument("run", metavar="RUN", help="a run's name or folder")
    trace = with_runs(add("trace", "a run as a trace for ui.perfetto.dev", _trace))
    trace.add_argument("run", metavar="RUN", help="a run's name or folder")
    trace.add_argument("out", metavar="OUT", type=Path, nargs="?", help="a file (trace.json in the run's folder)")
    for name, text in ORDERS.items():
        command = with_runs(add(name, text, _order))
        command.set_defaults(action=name, replica=None, replicas=None, force=False)
        command.add_argument("run", metavar="RUN", help="a running job's name or folder")
        if name == "scale":
            command.add_argument("replicas", type=int, metavar="N", help="from 1 to max_replicas")
        command.add_argument("--reason", default="", help="for the journal")
        if name not in ("checkpoint", "scale"):
            command.add_argument("--replica", type=int, required=True, metavar="ID")
        if name in ("drain", "scale"):
            command.add_argument("--force", action="store_true", help="even below quorum.min_replicas")
    export = with_json(add("export", "a checkpoint's model as Hugging Face safetensors", _export))
    export.add_argument("folder", metavar="CHECKPOINT_DIR", type=Path, help="checkpoint.dir of the job")
    export.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    export.add_argument("--step", type=int, metavar="N", help="which one (the newest)")
    export.add_argument("--key", metavar="FILE", help="the job's checkpoint.key (yours)")
    export.add_argument("--trust", action="store_true", help="whoever wrote the folder: no key is asked for")
    return parser


def _up(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.local import up

    code, summary = up(_config(args), stream=sys.stderr if args.json else sys.stdout)
    if args.json:
        _print_json(summary)
    return code


def _lighthouse(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.by_hand import lighthouse

    return lighthouse(_config(args), args.url)


def _replica(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.by_hand import replica

    return replica(_config(args), args.replica, args.lighthouse)


def _submit(args: argparse.Namespace) -> int:
    config = _config(args)
    with _needs_ray("submit"):
        from ft_hsdp.launch.ray.cluster import destination
        from ft_hsdp.launch.ray.submit import submit

        address = destination(args.ray_address)
        if "://" in address:
            from ft_hsdp.launch.ray import jobs

            return jobs.submit(config, args.config, args.overrides, address, json=args.json)
    code, summary = submit(config, address, stream=sys.stderr if args.json else sys.stdout)
    if args.json:
        _print_json(summary)
    return code


def _render(args: argparse.Namespace) -> int:
    sys.stdout.write(rendering.render(_config(args), args))
    sys.stdout.flush()
    return EXIT_OK


def _status(args: argparse.Namespace) -> int:
    if args.ray_address is not None:
        with _needs_ray("status --ray-address"):
            from ft_hsdp.launch.ray import status as in_cluster
        told, shown = in_cluster.status(args.ray_address, args.run)
        if args.json:
            _print_json(told)
        else:
            _print(shown)
        return EXIT_OK
    from ft_hsdp.launch.status import find, lines, status

    run = find(args.runs_dir, args.run)
    picture = status(run)
    if args.json:
        _print_json(picture)
    else:
        _print(lines(run, picture))
    return EXIT_OK


@contextlib.contextmanager
def _needs_ray(command: str) -> Iterator[None]:
    """One line where Ray is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        allowed = "another one, or this one once Ray is installed: pip install 'ft_hsdp[ray]'"
        raise ConfigError("command", command, allowed) from None


def _chaos(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.inflict import by_hand, described
    from ft_hsdp.launch.status import find
    from ft_hsdp.sentences import tell

    options = ("kind", "replica", "rank", "target", "signal", "for_s", "by_s", "delay_s", "reject")
    ends = None if args.edge is None else [int(e) if e.isdecimal() else e for e in args.edge.split(",")]
    injection = described(edge=ends, **{name: getattr(args, name) for name in options})
    event = by_hand(find(args.runs_dir, args.run), injection)
    if args.json:
        _print_json(event)
    else:
        _print([tell(event)])
    return EXIT_OK


def _bench(args: argparse.Namespace) -> int:
    from ft_hsdp.bench.command import BENCHES

    results = {}
    for what in dict.fromkeys(args.what):
        results[what], show = BENCHES[what](args, sys.stderr)
        show(results[what], sys.stderr if args.json else sys.stdout)
    if args.json:
        _print_json(results if len(results) > 1 else next(iter(results.values())))
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    from ft_hsdp.control.lighthouses import listed
    from ft_hsdp.launch.doctor import Subject, examine

    urls = listed(args.lighthouse) if args.lighthouse else ()
    findings = examine(Subject(_config(args), urls, args.ray, args.ray_address))
    well = all(finding.ok for finding in findings)
    if args.json:
        checks = [{"name": f.name, "ok": f.ok, "state": f.state.value, "text": f.text} for f in findings]
        _print_json({"ok": well, "checks": checks})
    else:
        marks = {"ok": "ok", "fail": "FAIL", "skip": "?"}
        _print([f"{marks[f.state.value]:<4}  {f.name:<10} {' '.join(f.text.split())}" for f in findings])
    return EXIT_OK if well else EXIT_CONFIG


def _schema(_: argparse.Namespace) -> int:
    from ft_hsdp.config import json_schema

    _print([json_schema().rstrip("\n")])
    return EXIT_OK


def _replay(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.status import named

    run = named(args.runs_dir, args.run)
    if args.page and args.json:
        raise ConfigError("--page", True, "without --json: the page is not a document")
    if args.page:
        return _page(run, args.port)
    from ft_hsdp.launch import replay  # torch is only needed here

    verdict = replay.replay(run)
    if args.json:
        _print_json(asdict(verdict))
    else:
        _print([str(verdict)])
        if sys.stdout.isatty():
            _page(run, args.port)
    return EXIT_OK if verdict.equal else EXIT_RETRYABLE


def _page(run: RunDir, port: int) -> int:
    from ft_hsdp.launch.page import serve_run

    if not 0 <= port <= 65535:
        raise ConfigError("--port", port, "0 to 65535")
    serve_run(run, "127.0.0.1", port, lambda link: _print([f"{link} until Ctrl-C"]))
    return EXIT_OK


def _explain(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.recorder import events_of
    from ft_hsdp.launch.rundir import read_json
    from ft_hsdp.launch.starts import starts
    from ft_hsdp.launch.status import named
    from ft_hsdp.launch.story import story

    run = named(args.runs_dir, args.run)
    events = events_of(run)
    summary = read_json(run.summary) or {}
    failures, lost = summary.get("failures", []), summary.get("lost", [])
    if args.json:
        told = [asdict(start) for start in starts(events, failures)]
        _print_json({"run": str(run.path), "events": events, "starts": told, "failures": failures, "lost": lost})
    else:
        _print(story(events, failures, lost))
    return EXIT_OK


def _verify(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.status import named
    from ft_hsdp.launch.verify import verify

    found = verify(named(args.runs_dir, args.run))
    if args.json:
        _print_json({"ok": not found.breaches, **asdict(found)})
    else:
        _print(found.lines)
    return BREACH if found.breaches else EXIT_OK


def _order(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.admin import order
    from ft_hsdp.launch.status import find

    run = find(args.runs_dir, args.run)
    _print([order(run, args.action, args.replica, args.reason, args.force, args.replicas)])
    return EXIT_OK


def _trace(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.status import named
    from ft_hsdp.launch.trace import write

    _print([str(write(named(args.runs_dir, args.run), args.out))])
    return EXIT_OK


def _export(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.export import export

    key = None if args.trust else secret.checkpoint_key(args.key)
    done = export(args.folder, args.out, args.step, key)
    if args.json:
        _print_json(asdict(done))
    else:
        skipped = [f"passed over {each.name}: {each.reason}" for each in done.skipped]
        _print([*skipped, f"step {done.step}: {done.parameters} parameters in {done.out}"])
    return EXIT_OK


def _config(args: argparse.Namespace) -> Config:
    return load(args.config, args.overrides)


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _print_json(value: Any) -> None:
    _print([json.dumps(value)])


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(" ".join(text.split()) + "\n")


def _let_go() -> None:
    """Have the interpreter not end with a code of its own over output that no disk took."""
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        except ValueError:  # it is closed
            pass


if __name__ == "__main__":
    sys.exit(main())
