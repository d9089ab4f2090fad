"""The command line: `python launcher.py ...`, installed as `ft-hsdp`.

Bad input gets one line on stderr and its exit code, never a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from ft_hsdp import secret
from ft_hsdp.config import Config, load
from ft_hsdp.errors import EXIT_CONFIG, EXIT_HARDWARE, EXIT_OK, EXIT_RETRYABLE, ConfigError, FtHsdpError, one_line
from ft_hsdp.launch.arguments import ORDERS, build_parser
from ft_hsdp.launch.backend.processes import foreign
from ft_hsdp.launch.run.directory import DAMAGED, RunDir, find_run, find_running, read_json
from ft_hsdp.lifetime import MARK_VARIABLE, drain, forgiving, outlive_notices

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")  # an override without its two dashes
INTERRUPTED = 130  # exit code after Ctrl-C
JOBS = ("up", "lighthouse", "replica", "host", "submit")  # commands that run a job, or a part of one
# Commands that read what a run has logged.
READING = ("status", "diagnose", "explain", "goodput", "verify", "locate", "trace", "replay")
EXAMPLES = Path(__file__).parents[1] / "configs"
RAY = "another one, or this one once Ray is installed: pip install 'ft_hsdp[ray]'"
BREACH = 1  # exit code of `verify` for a run that breaks the protocol


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Returns:
        The exit code as in `ft_hsdp.errors`; 130 after Ctrl-C; 1 from `verify` if the run breaks the protocol.
    """
    _hold_descriptors()
    if MARK_VARIABLE in os.environ:  # the script of a rank starts this job: the rank's place is not ours
        for name in foreign(os.environ):
            del os.environ[name]
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except FtHsdpError as error:
        _print_error(str(error) or type(error).__name__)
        return error.exit_code
    except KeyboardInterrupt:
        _print_error("stopped")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of stdout has ended
        return EXIT_OK
    except OSError as error:  # most likely a full disk, so a later try may succeed
        _print_error(f"{error.filename or 'this machine'}: {error.strerror or error}")
        return EXIT_RETRYABLE
    finally:
        _finish_output()


def _hold_descriptors() -> None:
    """Have /dev/null stand for each of stdin, stdout and stderr that is closed, before a file gets its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout, sys.stderr = sys.stdout or forgiving(1), sys.stderr or forgiving(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of a terminal that has ASCII alone


def _outlive_output(json: bool) -> None:
    """Let no fault of stdout and stderr end or stop the job that this process runs, nor a notice (`lifetime`).

    With ``json`` stdout gets one document after the job, which waits for its reader.
    """
    outlive_notices()
    if sys.stdout is sys.__stdout__:
        sys.stdout = forgiving(1, patient=not json)
    if sys.stderr is sys.__stderr__:
        sys.stderr = forgiving(2, patient=True)


def _main(argv: Sequence[str]) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command in JOBS:
        _outlive_output(getattr(args, "json", False))
    overrides = [word for word in rest if word.startswith("--") and "=" in word]
    unknown = [word for word in rest if word not in overrides]
    if missing := next((word for word in unknown if "config" in args and _OVERRIDE.match(word)), None):
        parser.error(f"{missing}: an override begins with two dashes: --{missing}")
    if unknown or (overrides and "config" not in args):
        hint = "; an override is one word: --dotted.key=value" if unknown and "config" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown or overrides)}{hint}")
    args.overrides, args.argv = overrides, argv
    try:
        return COMMANDS[args.command](args)
    except DAMAGED as error:
        if args.command not in READING or isinstance(error, OSError):
            raise
        allowed = (
            f"one whose files have no odd values ({type(error).__name__}: {error}); `verify` says where they are"
        )
        raise ConfigError("RUN", getattr(args, "run", None), allowed) from error


def _up(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.local import up

    code, summary = up(_config(args), stream=sys.stderr if args.json else sys.stdout)
    _show(args, summary)
    return code


def _lighthouse(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.standalone import lighthouse

    return lighthouse(_config(args), args.url)


def _replica(args: argparse.Namespace) -> int:
    if args.holder is None and "RANK" not in os.environ:  # torchrun starts the ranks themselves
        return _hold(args.argv)
    from ft_hsdp.launch.host import replica

    return replica(_config(args), args.replica, args.lighthouse, args.holder, args.again)


def _host(args: argparse.Namespace) -> int:
    if args.holder is None:
        return _hold(args.argv)
    from ft_hsdp.launch.host import host

    return host(_config(args), args.lighthouse, args.holder, args.again)


def _hold(words: Sequence[str]) -> int:
    from ft_hsdp.launch.holder import hold

    return hold(words)


def _submit(args: argparse.Namespace) -> int:
    config = _config(args)
    with _needs("ray", "command", "submit", RAY):
        from ft_hsdp.launch.ray.cluster import destination
        from ft_hsdp.launch.ray.submit import submit

        address = destination(args.ray_address)
        if "://" in address:
            from ft_hsdp.launch.ray.submit import submit_through_jobs_api

            return submit_through_jobs_api(config, args.config, args.overrides, address, json=args.json)
    code, summary = submit(config, address, stream=sys.stderr if args.json else sys.stdout)
    _show(args, summary)
    return code


def _render(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.render.jobset import jobset
    from ft_hsdp.launch.render.rayjob import rayjob
    from ft_hsdp.launch.render.settings import Site
    from ft_hsdp.launch.render.slurm import slurm

    given = {field: getattr(args, field, None) for field in Site.__dataclass_fields__}
    site = Site(**{"python": sys.executable, **{field: v for field, v in given.items() if v is not None}})
    text = {"slurm": slurm, "jobset": jobset, "rayjob": rayjob}[args.target](_config(args), site)
    sys.stdout.buffer.write(text.encode(errors="surrogateescape"))  # UTF-8 in any locale: others read it
    sys.stdout.flush()
    return EXIT_OK


def _status(args: argparse.Namespace) -> int:
    name = args.run or args.name
    if args.ray_address is not None:
        with _needs("ray", "command", "status --ray-address", RAY):
            from ft_hsdp.launch.ray import submit as in_cluster
        document, text = in_cluster.status(args.ray_address, name)
        _show(args, document, lambda: text)
        return EXIT_OK
    from ft_hsdp.launch.run.status import lines, status

    run = find_running(args.runs_dir, name)
    document = status(run)
    _show(args, document, lambda: lines(run, document))
    return EXIT_OK


@contextlib.contextmanager
def _needs(package: str, key: str, value: str, allowed: str) -> Iterator[None]:
    """Raise ConfigError within a ``with`` block if a package is not installed; the others are its arguments."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigError(key, value, allowed) from None


def _chaos(args: argparse.Namespace) -> int:
    from ft_hsdp.event_table import tell
    from ft_hsdp.launch.injection import inject_by_hand, parse_options

    options = ("kind", "replica", "rank", "host", "target", "signal", "for_s", "reject")
    ends = None if args.edge is None else [int(e) if e.isdecimal() else e for e in args.edge.split(",")]
    injection = parse_options(edge=ends, **{name: getattr(args, name) for name in options})
    event = inject_by_hand(find_running(args.runs_dir, args.run), injection)
    _show(args, event, lambda: [tell(event)])
    return EXIT_OK


def _bench(args: argparse.Namespace) -> int:
    elsewhere = f"none here; this one is in the repository: python launcher.py bench {args.what[0]}"
    with _needs("benchmarks", "bench", args.what[0], elsewhere):
        benches = import_module("benchmarks.command")
    results = benches.run_benches(args)
    _show(args, results if len(results) > 1 else next(iter(results.values())))
    return EXIT_OK


def _doctor(args: argparse.Namespace) -> int:
    from ft_hsdp.control.lighthouse_client import parse_urls
    from ft_hsdp.launch.doctor import Subject, examine

    urls = parse_urls(args.lighthouse) if args.lighthouse else ()
    findings = examine(Subject(_config(args), urls, args.ray, args.ray_address))
    well = all(finding.ok for finding in findings)
    checks = [{"name": f.name, "ok": f.ok, "state": f.state.value, "text": f.text} for f in findings]
    marks = {"ok": "ok", "fail": "FAIL", "skip": "?"}
    lines = [f"{marks[f.state.value]:<4}  {f.name:<10} {' '.join(f.text.split())}" for f in findings]
    _show(args, {"ok": well, "checks": checks}, lambda: lines)
    return EXIT_OK if well else EXIT_CONFIG


def _sdc_check(args: argparse.Namespace) -> int:
    from ft_hsdp.analysis import outliers
    from ft_hsdp.launch import sdc_check  # torch is only needed here

    if (args.config is None) == (args.compare is None):
        raise ConfigError("sdc-check", "CONFIG and --compare", "one of them")
    if args.compare is None:
        document = sdc_check.check(_config(args), args.steps, args.together)
        _show(args, document, lambda: outliers.lines(document))
        return EXIT_OK if document["ok"] else EXIT_HARDWARE
    documents, refused = sdc_check.read(args.compare)
    for line in refused:
        _print_error(line)
    found, words = outliers.judge_all(documents)
    _show(args, found, lambda: words)
    return EXIT_CONFIG if refused else EXIT_OK if found["ok"] else EXIT_HARDWARE


def _study(args: argparse.Namespace) -> int:
    from ft_hsdp.analysis import studies
    from ft_hsdp.launch import study  # torch is only needed here

    wanted = study.read(args.file)
    trained = study.run(wanted, args.jobs, lambda progress: _progress(str(progress)))
    results = study.results(trained)
    found = studies.judge(results)
    study.write(Path(wanted.dir), found)
    _show(args, studies.document(found), lambda: studies.table(found))
    return EXIT_OK


def _progress(text: str) -> None:
    sys.stderr.write(f"\r{text:<70}" if sys.stderr.isatty() else f"{text}\n")


def _plan(args: argparse.Namespace) -> int:
    from ft_hsdp.analysis.costs import ASSUMED, Assumptions
    from ft_hsdp.analysis.plan import plan
    from ft_hsdp.analysis.plan_table import lines

    assumptions = Assumptions(**{name: getattr(args, name) for name in ASSUMED})
    document = plan(_config(args), assumptions, args.hosts, args.parameters)
    if args.json:
        # The figures are bounded: Infinity would be a fault of ours.
        _print([json.dumps(document, allow_nan=False)])
    else:
        _print(lines(document))
    return EXIT_OK


def _schema(_: argparse.Namespace) -> int:
    from ft_hsdp.config import json_schema

    _print([json_schema().rstrip("\n")])
    return EXIT_OK


def _example(args: argparse.Namespace) -> int:
    examples = {path.stem: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.yaml"))}
    if args.name is None:
        width = max(map(len, examples))
        _print([f"{name:<{width}}  {_first_sentence(text)}" for name, text in examples.items()])
    elif args.name in examples:
        _print([examples[args.name].rstrip("\n")])
    else:
        raise ConfigError("NAME", args.name, ", ".join(examples))
    return EXIT_OK


def _first_sentence(text: str) -> str:
    """What an example's opening comment says first; the line before it names the schema, for editors."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].removesuffix(".")


def _replay(args: argparse.Namespace) -> int:
    run = find_run(args.runs_dir, args.run)
    if args.page and args.json:
        raise ConfigError("--page", "--page --json", "one of them: the page is not a JSON document")
    if args.page:
        return _page(run, args.port)
    from ft_hsdp.launch.run import replay  # torch is only needed here

    begins = f"{run.name} is trained once more; this takes about its CPU time\n"
    verdict = replay.replay(run, lambda: sys.stderr.write(begins))
    _show(args, asdict(verdict), lambda: [str(verdict)])
    if not args.json and sys.stdout.isatty():
        _page(run, args.port)
    return EXIT_OK if verdict.equal else EXIT_RETRYABLE


def _page(run: RunDir, port: int) -> int:
    from ft_hsdp.launch.run.page import serve_run

    if not 0 <= port <= 65535:
        raise ConfigError("--port", port, "0 to 65535")
    serve_run(run, "127.0.0.1", port, lambda link: _print([f"{link} until Ctrl-C"]))
    return EXIT_OK


def _diagnose(args: argparse.Namespace) -> int:
    from ft_hsdp.analysis.diagnosis import describe
    from ft_hsdp.launch.run.diagnose import ask, lines, load_dump, save

    file = Path(args.name) if args.name else None
    dump = load_dump(file) if file is not None and file.is_file() else ask(find_running(args.runs_dir, args.name))
    if args.dump is not None:
        save(dump, args.dump)
    document = describe(dump)
    _show(args, document, lambda: lines(document))
    return EXIT_OK


def _explain(args: argparse.Namespace) -> int:
    from ft_hsdp.analysis.incarnations import starts
    from ft_hsdp.launch.run.recorder import events_of
    from ft_hsdp.launch.run.summary import explain

    run = find_run(args.runs_dir, args.run)
    events = events_of(run)
    summary = read_json(run.summary) or {}
    failures, lost = summary.get("failures", []), summary.get("lost", [])
    found = [asdict(start) for start in starts(events, failures)]
    document = {"run": str(run.path), "events": events, "starts": found, "failures": failures, "lost": lost}
    _show(args, document, lambda: explain(events, failures, lost))
    return EXIT_OK


def _goodput(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.run.goodput import draw, goodput, lines

    named = args.run = args.config
    if named is not None and named.is_file():
        subject: Any = _config(args)
    elif args.overrides:
        raise ConfigError("CONFIG", str(named), "the file of a job, where keys of it are given")
    else:
        subject = named and find_run(args.runs_dir, str(named))
    document = goodput(subject, args.phases)
    if args.plot is not None:
        with _needs("matplotlib", "--plot", str(args.plot), "none here: the module matplotlib draws it"):
            draw(document, args.plot)
    _show(args, document, lambda: [*lines(document)])
    return EXIT_OK


def _verify(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.run.verify import verify

    found = verify(find_run(args.runs_dir, args.run))
    _show(args, {"ok": not found.breaches, **asdict(found)}, lambda: found.lines)
    return BREACH if found.breaches else EXIT_OK


def _locate(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.run.locate import locate

    found = locate(find_run(args.runs_dir, args.run), args.parameter, args.index, args.step)
    _show(args, asdict(found), found.lines)
    return EXIT_OK


def _order(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.admin import order

    run = find_running(args.runs_dir, args.run)
    _print([order(run, args.command, args.replica, args.reason, args.force, args.replicas, args.host)])
    return EXIT_OK


def _trace(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.run.trace import write

    _print([str(write(find_run(args.runs_dir, args.run), args.out))])
    return EXIT_OK


def _export(args: argparse.Namespace) -> int:
    from ft_hsdp.launch.export import export, source_of

    folder, key = source_of(args.runs_dir, args.source)
    if args.trust:
        key = None
    elif key is None or args.key is not None:
        key = secret.checkpoint_key(args.key)
    done = export(folder, args.out, args.step, key, args.base)
    _show(args, asdict(done), done.lines)
    return EXIT_OK


def _config(args: argparse.Namespace) -> Config:
    return load(args.config, args.overrides)


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _show(args: argparse.Namespace, document: Any, lines: Callable[[], Sequence[str]] = tuple) -> None:
    _print([json.dumps(document)] if args.json else lines())


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(one_line(text) + "\n")


def _finish_output() -> None:
    """Flush the output, so that the interpreter ends at once and keeps the exit code if the disk is full."""
    gc.freeze()  # otherwise its last collection searches all of torch, which takes a second
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
            drain(stream)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        except ValueError:  # it is closed
            pass


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "lighthouse": _lighthouse,
    "replica": _replica,
    "host": _host,
    "submit": _submit,
    "render": _render,
    "status": _status,
    "chaos": _chaos,
    "bench": _bench,
    "doctor": _doctor,
    "sdc-check": _sdc_check,
    "study": _study,
    "plan": _plan,
    "schema": _schema,
    "example": _example,
    "replay": _replay,
    "diagnose": _diagnose,
    "explain": _explain,
    "goodput": _goodput,
    "verify": _verify,
    "locate": _locate,
    "trace": _trace,
    **dict.fromkeys(ORDERS, _order),
    "export": _export,
}

if __name__ == "__main__":
    sys.exit(main())
