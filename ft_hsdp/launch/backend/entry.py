"""What every launcher runs in a rank: the built-in trainer, or the user's script or function (`entry`).

A script runs as `python my_train.py` would run it: as ``__main__``, with its arguments in ``sys.argv`` and its
folder first on ``sys.path``. A function is called without arguments, as a console script is, and the working
directory is first on ``sys.path``. Neither needs to know which launcher it is: `join` takes everything from here.

The exit code of a rank decides whether its replica is started again:

    an exception of ft_hsdp      its exit code
    SystemExit                   its code, as Python does
    another exception            75: it may not happen again
    the same before `join`       64, unless it may be temporary (an error of the system or of a device): then the
                                 script is wrong, on every rank
    an end without `join`        64
    an end with 0 before that    0, and the replica is done: it is not started again (`Job.finish`)
    of training
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ft_hsdp import protocol
from ft_hsdp.config import Config
from ft_hsdp.config.entry import anchored, is_function, stamped, title
from ft_hsdp.core.restart import Cause
from ft_hsdp.errors import EXIT_CONFIG, EXIT_LEFT, EXIT_OK, EXIT_RETRYABLE, FtHsdpError, one_line
from ft_hsdp.launch.backend import rank_end
from ft_hsdp.lifetime import leave
from ft_hsdp.state.agent import messages, server
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.train import trainer
from ft_hsdp.train.device import prepare
from ft_hsdp.train.identity import FromEnvironment, IncarnationSource, early_agent
from ft_hsdp.train.job import Job
from ft_hsdp.train.join import Launch, has_joined, joined_job, launched
from ft_hsdp.train.replay.job import Recorded
from ft_hsdp.train.replay.planned import Variant
from ft_hsdp.train.replay.trial import Trial

TEMPORARY = (OSError, MemoryError, RuntimeError)  # torch's errors of devices are RuntimeErrors
# Once, for all ranks that are forked from this process: a replica that returns must not build them on its way.
for each in (protocol, messages, shard_manifest):
    each.prepare()
_OURS = (__file__, runpy.__file__, "<frozen runpy>", importlib.__file__, "<frozen importlib._bootstrap>")


def main(
    config: Config,
    replica: int | IncarnationSource,
    run: Path,
    recorded: Recorded | Variant | Trial | None = None,
) -> int:
    """Run one rank, of a replica that is known or will be assigned.

    Args:
        replica: The replica's id, or where this process hears of its incarnation.
        recorded: The steps that it repeats, if this is a replay; those that are planned (`study`); or how it is
            tried (`sdc-check`).

    Returns:
        The exit code.
    """
    source = FromEnvironment(replica) if isinstance(replica, int) else replica

    def tell(error: BaseException, cause: Cause | None = None) -> None:
        incarnation, rank = source.poll(), os.environ.get("RANK", "")
        if incarnation is not None and rank.isdecimal():
            rank_end.tell(run, incarnation.replica, int(rank), str(incarnation), error, cause)

    try:
        config = anchored(stamped(config))  # the digest is of the file that is about to run
    except FtHsdpError as error:
        _say(str(error))
        tell(error, Cause.CHANGED)
        return error.exit_code
    starter = None
    if not isinstance(source, FromEnvironment) and (incarnation := source.poll()) is not None:
        starter = early_agent(config, run, incarnation.replica, server.main)
    launched(Launch(config, source, run, recorded, starter))
    if config.entry is not None and isinstance(source, FromEnvironment):  # elsewhere the supervisor watches
        _watch(title(config.entry), config.timeouts.start_s)
    prepare(config.train.device, max(config.timeouts.step_s, config.timeouts.pause_s))  # before a script uses CUDA
    code = _run(config, tell)
    under_torchrun = isinstance(source, FromEnvironment) and recorded is None
    if config.entry is not None and not under_torchrun and code != EXIT_RETRYABLE:
        # Ranks of the fork server and of a replay end without the end of the interpreter; this does what it would.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    return code


def _run(config: Config, tell: Callable[[BaseException], None]) -> int:
    """Run what the job trains to its end; return the exit code. ``tell`` takes the error that ends it."""
    name = title(config.entry or "ft_hsdp.train.trainer:train")
    try:
        try:
            if config.entry is None:
                trainer.train(config)
                code = EXIT_OK
            else:
                result = _call(config.entry, config.args)
                code = EXIT_OK if result is None else _status(result)
        except SystemExit as end:
            code = _status(end.code)
            if code not in (EXIT_OK, EXIT_RETRYABLE, EXIT_LEFT):
                tell(end)
        if code == EXIT_OK and isinstance(job := joined_job(), Job):
            job.finish()
    except SystemExit as end:  # it was told to leave meanwhile
        code = _status(end.code)
    except FtHsdpError as error:
        tell(error)
        _say(str(error) or type(error).__name__)
        return error.exit_code
    except Exception as error:
        tell(error)
        traceback.print_exception(type(error), error, _own_frames(error.__traceback__))
        _say(f"{name}: {type(error).__name__}: {error}")
        wrong = not has_joined() and not isinstance(error, TEMPORARY)
        return EXIT_CONFIG if wrong else EXIT_RETRYABLE
    if code == EXIT_OK and not has_joined():
        _say(f"{name} has ended and never called ft_hsdp.join(): each rank has to join the job")
        return EXIT_CONFIG
    return code


def _call(entry: str, args: tuple[str, ...]) -> object:
    """Run a script, or call a function and return its result."""
    sys.argv = [entry, *args]
    if not is_function(entry):
        path = Path(entry).resolve()
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
        return None
    sys.path.insert(0, os.getcwd())
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)()


def _status(code: object) -> int:
    """Return the exit code for what `sys.exit` was given; anything but a number and None is a message."""
    if code is None:
        return EXIT_OK
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of the user's on."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    return trace


def _say(text: str) -> None:
    """Write one line that can be shown anywhere: the last line of its log tells why a rank ended."""
    sys.stderr.write(f"{one_line(text)}\n")
    sys.stderr.flush()


def _watch(name: str, start_s: float) -> None:
    """End this process if it has not called `join` after ``start_s`` seconds; say where it hangs."""

    def late() -> None:
        if has_joined():
            return
        faulthandler.dump_traceback(all_threads=True)
        _say(f"{name} has not called ft_hsdp.join() within {start_s:g} s (timeouts.start_s)")
        leave(EXIT_RETRYABLE)

    timer = threading.Timer(start_s, late)
    timer.daemon = True
    timer.start()
