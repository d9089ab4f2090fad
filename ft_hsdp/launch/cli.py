"""The command line: `python launcher.py ...`, installed as `ft-hsdp`.

Bad input gets one line on stderr and its exit code, never a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ft_hsdp.config import Config, load
from ft_hsdp.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRYABLE, ConfigError, FtHsdpError

INTERRUPTED = 130
MEASURES = (
    "of ftar: bandwidth (default), spin, kill, reconfigure, link; of fetch: large, small; "
    "of recovery: kill, torchft, rejoin, readers, local; "
    "of overhead: steady, snapshot, link; or all"
)
BENCH_TIME = (
    "On 2 quiet cores ftar by default takes about 5 minutes, and 15 GiB of memory (all measures 12); "
    "fetch 2, and 10 GiB; recovery 12; overhead 20"
)
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
    with_config(add("lighthouse", "the lighthouse of a job, by itself", _lighthouse))
    replica = with_config(add("replica", "one replica of a job, or one rank of it under torchrun", _replica))
    replica.add_argument("--replica", type=int, required=True, metavar="ID", help="which one, from 0")
    replica.add_argument("--lighthouse", metavar="URL", help="where it is, if not in the run directory")
    status = with_runs(with_json(add("status", "the running job: steps, replicas, ranks, pids", _status)))
    status.add_argument("--run", metavar="RUN", help="a run's name or folder (the newest that runs)")
    submit = with_config(add("submit", "the same job on a Ray cluster", _not_here))
    submit.set_defaults(name="submit")
    chaos = with_runs(with_json(add("chaos", "send a signal to one rank of a running job", _chaos)))
    chaos.add_argument("run", metavar="RUN", help="a run's name or folder")
    chaos.add_argument("--replica", type=int, required=True, metavar="ID")
    chaos.add_argument("--rank", type=int, default=0, metavar="RANK", help="0 by default")
    chaos.add_argument("--signal", choices=["KILL", "STOP", "TERM"], default="KILL", help="KILL by default")
    chaos.add_argument("--for-s", type=float, default=0.0, metavar="S", help="with STOP: continue after S s")
    bench = with_json(add("bench", "the figures, beside their anchors", _bench))
    bench.add_argument("what", nargs="+", choices=["ftar", "quorum", "fetch", "recovery", "overhead"])
    bench.add_argument("--measure", metavar="WHAT", help=MEASURES)
    bench.add_argument("--sizes", metavar="LIST", help="of messages or states, e.g. 64KiB,1MiB")
    bench.add_argument("--members", metavar="LIST", help="ring sizes, e.g. 2,4")
    bench.add_argument("--contenders", metavar="LIST", help="tcp,shm,shm-any,c10d,gloo,torchft,openmpi")
    bench.add_argument(
        "--rounds", type=int, metavar="N", help="of what is interleaved: 20, 5 (recovery), 200 steps"
    )
    bench.add_argument("--kills", type=int, default=200, metavar="N", help="recovery: how many, 200 by default")
    bench.epilog = BENCH_TIME
    bench.set_defaults(name="bench")
    with_json(with_config(add("doctor", "preflight: name, port, data, memory, disk", _doctor)))
    replay = with_runs(with_json(add("replay", "train a recorded run again and compare", _replay)))
    replay.add_argument("run", metavar="RUN", help="a run's name or folder")
    explain = with_runs(with_json(add("explain", "what happened in a run, and why", _explain)))
    explain.add_argument("run", metavar="RUN", help="a run's name or folder")
    export = with_json(add("export", "a checkpoint's model as Hugging Face safetensors", _export))
    export.add_argument("folder", metavar="CHECKPOINT_DIR", type=Path, help="checkpoint.dir of the job")
    export.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    export.add_argument("--step", type=int, metavar="N", help="which one (the newest)")
    return parser


def _up(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.local import up

    code, summary = up(_config(args), stream=sys.stderr if args.json else sys.stdout)
    if args.json:
        _print_json(summary)
    return code


def _lighthouse(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.by_hand import lighthouse

    return lighthouse(_config(args))


def _replica(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.by_hand import replica

    return replica(_config(args), args.replica, args.lighthouse)


def _status(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.status import find, lines, status

    picture = status(find(args.runs_dir, args.run))
    if args.json:
        _print_json(picture)
    else:
        _print(lines(picture))
    return EXIT_OK


def _chaos(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.chaos import by_hand
    from ft_hsdp.launch.status import find

    event = by_hand(find(args.runs_dir, args.run), args.replica, args.rank, args.signal, args.for_s)
    if args.json:
        _print_json(event)
    else:
        _print([f"{event['kind']} sent to pid {event['pid']}"])
    return EXIT_OK


def _bench(args: argparse.Namespace) -> int:
    from ft_hsdp.bench.command import BENCHES

    if not set(args.what) <= set(BENCHES):
        return _not_here(args)
    results = {}
    for what in dict.fromkeys(args.what):
        results[what], show = BENCHES[what](args, sys.stderr)
        show(results[what], sys.stderr if args.json else sys.stdout)
    if args.json:
        _print_json(results if len(results) > 1 else next(iter(results.values())))
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.doctor import examine

    findings = examine(_config(args))
    well = all(finding.ok for finding in findings)
    if args.json:
        _print_json({"ok": well, "checks": [{"name": f.name, "ok": f.ok, "text": f.text} for f in findings]})
    else:
        _print([f"{'ok  ' if f.ok else 'FAIL'}  {f.name:<7} {f.text}" for f in findings])
    return EXIT_OK if well else EXIT_CONFIG


def _replay(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.status import named

    run = named(args.runs_dir, args.run)
    from ft_hsdp.launch import replay  # torch is only needed here

    verdict = replay.replay(run)
    if args.json:
        _print_json(asdict(verdict))
    else:
        _print([str(verdict)])
    return EXIT_OK if verdict.equal else EXIT_RETRYABLE


def _explain(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.recorder import events_of
    from ft_hsdp.launch.rundir import read_json
    from ft_hsdp.launch.status import named
    from ft_hsdp.launch.story import story

    run = named(args.runs_dir, args.run)
    events = events_of(run)
    summary = read_json(run.summary) or {}
    failures, lost = summary.get("failures", []), summary.get("lost", [])
    if args.json:
        _print_json({"run": str(run.path), "events": events, "failures": failures, "lost": lost})
    else:
        _print(story(events, failures, lost))
    return EXIT_OK


def _export(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.export import export

    done = export(args.folder, args.out, args.step)
    if args.json:
        _print_json(asdict(done))
    else:
        skipped = [f"passed over {each.name}: {each.reason}" for each in done.skipped]
        _print([*skipped, f"step {done.step}: {done.parameters} parameters in {done.out}"])
    return EXIT_OK


def _not_here(args: argparse.Namespace) -> int:
    raise ConfigError("command", args.name, "another command; this one is not in this version")


def _config(args: argparse.Namespace) -> Config:
    return load(args.config, args.overrides)


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _print_json(value: Any) -> None:
    _print([json.dumps(value)])


def _complain(text: str) -> None:
    sys.stderr.write(" ".join(text.split()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
