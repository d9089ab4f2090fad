"""Runs all checks at once, each in a thread that may block, within one deadline.

A name server or a file system that does not answer affects its own check only.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from importlib.machinery import PathFinder
from typing import NamedTuple

from ft_hsdp import tls
from ft_hsdp.config import config_hash
from ft_hsdp.config.entry import digest, is_function, locate, stamped, title
from ft_hsdp.errors import FtHsdpError
from ft_hsdp.launch.doctor import host, network, ray, storage
from ft_hsdp.launch.doctor.result import Bad, CheckOutcome, CheckState, Subject, Undecided

DEADLINE_S = 20.0  # for all checks; usually they take a few seconds, Ray on a busy machine longer


class Check(NamedTuple):
    name: str
    look: Callable[[Subject], str]  # returns what it found; raises Bad or Undecided. It may block.
    wanted: Callable[[Subject], bool] = lambda _: True  # whether the check applies


def entry(subject: Subject) -> str:
    """Check that `entry` can be found and compiled, and that the modules that it imports first are here."""
    name = subject.config.entry
    assert name is not None
    stamped(subject.config)  # found, readable, and Python
    path = locate(name)
    content = path.read_bytes()
    shown = f"{title(name)} compiles (digest {digest(content)[:8]})"
    if path.suffix != ".py":
        return f"{title(name)} is in {path}, which is not Python source"
    tree = ast.parse(content)
    folder = os.getcwd() if is_function(name) else str(path.resolve().parent)
    missing = [each for each in dict.fromkeys(_imported(tree)) if not _is_here(each, folder)]
    if missing:
        wanted = ", ".join(missing)
        raise Bad(f"{title(name)} imports {wanted}: not installed here; pip install it, or set PYTHONPATH")
    function = name.partition(":")[2]
    if function and not _binds(tree, function):
        raise Bad(f"{path} has no {function} at its top level; write the name of a function after the colon")
    return f"{shown}; what it imports is here"


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first parts of the modules that are imported unconditionally at the top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def _is_here(module: str, folder: str) -> bool:
    """Return whether a module at the top can be imported by a script in ``folder``."""
    if module in sys.builtin_module_names or PathFinder.find_spec(module, [folder, *sys.path]) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None  # an installation may have a finder of its own
    except (ImportError, ValueError):
        return False


def _binds(tree: ast.Module, name: str) -> bool:
    """Return whether a name may be bound by a statement at the top level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


CHECKS = (
    Check("config", lambda s: f"hash {config_hash(s.config)} over model, data, optimizer and layout"),
    Check("versions", storage.installed),
    Check("name", storage.name),
    Check("hostname", network.hostname),
    Check("host", network.host),
    Check("domains", host.domains),
    Check("lighthouse", network.lighthouse, lambda s: bool(s.lighthouses)),
    Check("port", network.port),
    Check("sockets", network.sockets),
    Check("interface", network.interface),
    Check("tls", lambda s: tls.check(s.config.network, s.lighthouses)),
    Check("etcd", network.etcd, lambda s: bool(s.config.lighthouse.etcd) and not s.lighthouses),
    Check("clock", network.clock),
    Check("entry", entry, lambda s: s.config.entry is not None),
    Check("data", storage.data, lambda s: s.config.entry is None),
    Check("disk", storage.disk),
    Check("checkpoint", storage.checkpoint),
    Check("memory", host.memory),
    Check("copies", host.copies),
    Check("memfd", host.memfd),
    Check("shm", host.shm),
    Check("cpus", host.cpus),
    Check("files", host.files),
    Check("processes", host.processes),
    Check("memlock", host.memlock, lambda s: s.config.train.device != "cpu"),
    Check("device", host.device),
    Check("ray", ray.ray, ray.wanted),
)
"""In the order in which a job would meet the problems."""


def examine(
    subject: Subject, *, checks: Sequence[Check] = CHECKS, deadline_s: float = DEADLINE_S
) -> list[CheckOutcome]:
    """Run all checks that apply, and return their findings. Blocks for up to `deadline_s`.

    Args:
        deadline_s: A check that takes longer is undecided; its thread is left alone.
    """
    until = time.monotonic() + deadline_s
    begun = [(check.name, _begin(check, subject)) for check in checks if check.wanted(subject)]
    return [_end(name, future, until, deadline_s) for name, future in begun]


def _begin(check: Check, subject: Subject) -> Future[CheckOutcome]:
    """Start the check in a daemon thread, which does not keep the process alive after the deadline."""
    future: Future[CheckOutcome] = Future()

    def run() -> None:
        future.set_result(_look(check, subject))

    threading.Thread(target=run, name=f"doctor-{check.name}", daemon=True).start()
    return future


def _end(name: str, future: Future[CheckOutcome], until: float, deadline_s: float) -> CheckOutcome:
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        return CheckOutcome(
            name, CheckState.SKIP, f"no answer within {deadline_s:g} s: a name server, file system or device hangs"
        )


def _look(check: Check, subject: Subject) -> CheckOutcome:
    try:
        return CheckOutcome(check.name, CheckState.OK, check.look(subject))
    except (FtHsdpError, Bad) as error:
        return CheckOutcome(check.name, CheckState.FAIL, str(error))
    except Undecided as error:
        return CheckOutcome(check.name, CheckState.SKIP, str(error))
    except Exception as error:  # a fault of one check must not hide the findings of the others
        return CheckOutcome(
            check.name, CheckState.SKIP, f"the check itself failed: {type(error).__name__}: {error}"
        )
