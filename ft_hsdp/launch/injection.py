"""Injects one failure into the processes that a run has on this machine, and lifts it again.

Pids come from the run's files, or are those of helper processes that log into its folder. Each process is checked
to belong to the run before it is touched.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from ft_hsdp import fault_injection
from ft_hsdp.config import ChaosConfig, load
from ft_hsdp.config.explain import explain
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import LineWriter, replace_json
from ft_hsdp.launch.chaos import Injection, in_words, injection_of
from ft_hsdp.launch.run.directory import Row, RunDir, alive, read_json
from ft_hsdp.lifetime import start_ticks

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM, "CONT": signal.SIGCONT}
MODULES = {"fork_server": "ft_hsdp.launch.backend.zygote", "agent": "ft_hsdp.state.agent.server"}

Lift = Callable[[], None]
"""Ends a failure."""


@dataclass(frozen=True, slots=True)
class Inflicted:
    event: Row
    lift: Lift | None  # None: the failure cannot be ended

    def lifted(self, reason: str) -> Row:
        """End the failure and return the event that reports it."""
        if self.lift is not None:
            self.lift()
        return {**self.event, "t": time.time(), "event": "FailureLifted", "reason": reason}


def injection_event(injection: Injection, pid: int | None, incarnations: list[str], now: float) -> Row:
    """Return the event that reports an injection.

    Args:
        pid: Of the process that it hits, if it hits one.
        incarnations: The names of the incarnations that it hits.
        now: Unix time.
    """
    reason = injection.reason
    if injection.kind != "signal":
        reason = f"{in_words(injection)}: {reason}"
    one = incarnations[0] if injection.replica is not None and incarnations else None
    return {
        "t": now,
        "event": "FailureInjected",
        "source": "chaos",
        "replica": injection.replica,
        "rank": injection.rank,
        "incarnation": one,
        "kind": injection.event_kind,
        "pid": pid,
        "for_s": injection.for_s,
        **({} if injection.kind == "signal" else {"target": injection.victim, "lives": incarnations}),
        "reason": reason,
    }


def inflict(run: RunDir, injection: Injection) -> Inflicted:
    """Inject a failure on this machine.

    Raises:
        ConfigError: The process that it should hit does not run here.
        OSError: The kernel refuses.
    """
    i = injection
    pid: int | None = None
    lift: Lift | None = None
    now = time.time()
    if i.kind in fault_injection.HOOKED:
        lift = ordered(run, i)
    elif i.kind in ("helper", "flip"):
        pid = helper(run, "agent" if i.kind == "flip" else str(i.target), i.replica)
        if i.kind == "flip":
            _flip(pid)
        else:
            lift = _stopped(pid, i) if i.signal == "STOP" else None
            send(pid, i.signal)
    elif i.kind == fault_injection.HOST:
        i = replace(i, host=host_of(run, i))
        pid, *others = _on_host(run, i)
        lift = ordered(run, i)  # first, so that no rank is started there meanwhile
        for each in (pid, *others):
            send(each, "KILL")
    else:
        assert i.replica is not None
        pid, _ = rank_process(run, i.replica, i.rank or 0)
        send(pid, i.signal)
        lift = partial(send, pid, "CONT") if i.signal == "STOP" else None
    return Inflicted(injection_event(i, pid, incarnations(run, i), now), lift)


def incarnations(run: RunDir, injection: Injection) -> list[str]:
    """Return the incarnations that an injection hits, by the run's files."""
    hit = [injection.replica] if injection.edge is None else list(injection.edge)
    listed = [read_json(run.processes(replica)) for replica in hit if isinstance(replica, int)]
    return [str(one["incarnation"]) for one in listed if isinstance(one, dict)]


def host_of(run: RunDir, injection: Injection) -> str:
    """Return the name of the host that kind host hits: the named one, or that of the rank.

    Raises:
        ConfigError: The replica has no rank there, or no such rank.
    """
    listed = read_json(run.processes(injection.replica or 0)) or {"ranks": []}
    hosts = {rank["rank"]: str(rank["host"]) for rank in listed["ranks"]}
    if injection.host is None and injection.rank not in hosts:
        raise ConfigError(
            "--rank", injection.rank, f"one of {sorted(hosts)} (ranks of replica {injection.replica})"
        )
    name = injection.host or hosts[injection.rank or 0]
    if name not in hosts.values():
        there = sorted(set(hosts.values()))
        raise ConfigError("--host", name, f"one of {there} (hosts of replica {injection.replica})")
    return name


def _on_host(run: RunDir, injection: Injection) -> list[int]:
    """Return the pids of all ranks of a replica on a host, then of its state agents there. Raises ConfigError."""
    replica, host = injection.replica or 0, str(injection.host)
    rows = [rank for rank in read_json(run.processes(replica))["ranks"] if rank["host"] == host]
    ranks = [row["pid"] for row in rows if alive({"pid": row["pid"]}) and _belongs(row["pid"], run)]
    if not ranks:
        raise ConfigError("--host", host, f"a host of replica {replica} on this machine with a rank that runs")
    emulated = None if host == rows[0].get("machine", host) else host
    agents = [p.pid for p in psutil.process_iter() if _is_helper(p, run, MODULES["agent"], replica, emulated)]
    return [*ranks, *agents]


def send(pid: int, name: str) -> None:
    """Send signal `name` to a process, if it still runs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[name])


def _stopped(pid: int, injection: Injection) -> Lift:
    """Return what continues a stopped helper; another process does it for a supervisor that stops itself."""
    if pid == os.getpid():
        command = ["sh", "-c", f"sleep {injection.for_s:g}; kill -CONT {pid}"]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    return partial(send, pid, "CONT")


def rank_process(run: RunDir, replica: int, rank: int) -> tuple[int, str]:
    """Return pid and incarnation of a rank of a running job, by the run's files.

    Raises:
        ConfigError: There is no such rank, it does not run, or its pid belongs to another process.
    """
    listed = read_json(run.processes(replica))
    if not isinstance(listed, dict):
        raise ConfigError("--replica", replica, f"one of {run.replicas()} (replicas of {run.path})")
    pids = {entry["rank"]: entry["pid"] for entry in listed["ranks"]}
    if rank not in pids:
        raise ConfigError("--rank", rank, f"one of {sorted(pids)} (ranks of replica {replica})")
    pid = pids[rank]
    if not alive({"pid": pid}):
        raise ConfigError("--rank", rank, f"a rank that runs (pid {pid} of replica {replica} does not)")
    if not _belongs(pid, run):
        raise ConfigError("--rank", rank, f"a process of {run.path} (pid {pid} is another one)")
    return pid, str(listed["incarnation"])


def helper(run: RunDir, target: str, replica: int | None) -> int:
    """Return the pid of a helper process of a running job.

    Raises:
        ConfigError: It does not run on this machine.
    """
    if target in ("supervisor", "lighthouse"):
        named = read_json(run.supervisor if target == "supervisor" else run.lighthouse)
        if alive(named):
            return int(named["pid"])
    else:
        found = [p for p in psutil.process_iter() if _is_helper(p, run, MODULES[target], replica)]
        if found:
            return max(found, key=lambda p: start_ticks(p.pid)).pid
    raise ConfigError("--target", target, f"one that runs (there is none in {run.path} on this machine)")


def _is_helper(
    process: psutil.Process, run: RunDir, module: str, replica: int | None, host: str | None = ""
) -> bool:
    """Return whether a process runs `module`, for the given replica if any, and logs into this run's folder.

    A state agent is of the emulated `host`; None: of no emulated one; "": of any.
    """
    try:
        line = process.cmdline()
        if module not in line or (replica is not None and _after(line, "--replica") != str(replica)):
            return False
        if host != "" and _after(line, "--name") != host:
            return False
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
        # Ranks have the fork server's command line; they log into a folder of their replica, or of the spares.
        deep = replica is not None or host
        return log.is_relative_to(run.path.resolve()) if deep else log.parent == run.path.resolve()
    except (psutil.Error, OSError):
        return False


def _after(line: list[str], option: str) -> str | None:
    return line[line.index(option) + 1] if option in line[:-1] else None


def _belongs(pid: int, run: RunDir) -> bool:
    """Return whether the process, or its parent, was started for `run`."""
    try:
        process = psutil.Process(pid)
        above = process.parent()
        lines = [process.cmdline(), above.cmdline() if above else []]
    except psutil.Error:
        return False
    return any(str(run.path.resolve()) in line for line in lines)


def ordered(run: RunDir, injection: Injection, seconds: float = 0.0) -> Lift:
    """Order the ranks that are hit to inject the failure into themselves, by a file that they read."""
    i = injection
    lasts = fault_injection.RESET_S if i.kind == "reset" else i.for_s
    until = time.monotonic() + lasts if lasts > 0 else None
    edge = (i.edge[0], i.edge[1]) if i.edge is not None else None
    order = fault_injection.FaultOrder(i.kind, i.replica, i.rank, edge, i.reject, seconds, until, i.host)
    file = run.path / fault_injection.FOLDER / f"{secrets.token_hex(8)}.json"
    replace_json(file, asdict(order))
    return lambda: file.unlink(missing_ok=True)


def _flip(pid: int) -> None:
    """Flip a bit of a snapshot that the state agent `pid` keeps; raise ConfigError if it keeps none."""
    kept = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if "memfd:ft_hsdp-state" in os.readlink(f"/proc/{pid}/fd/{name}"):
                kept.append(f"/proc/{pid}/fd/{name}")
    if not kept:
        raise ConfigError("--kind", "flip", "another one: the state agent keeps no snapshot")
    descriptor = os.open(random.choice(kept), os.O_RDWR | os.O_CLOEXEC)
    try:
        at = random.randrange(os.fstat(descriptor).st_size)
        (byte,) = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ (1 << random.randrange(8))]), at)
    finally:
        os.close(descriptor)


# The command `chaos`.

_OPTIONS = {"replicas": "--replica"}  # options whose name is not that of their key


def parse_options(**options: Any) -> Injection:
    """Return the injection that the options of `chaos` ask for.

    Args:
        **options: Fields of `ChaosConfig`, and `replica`, an id or None.

    Raises:
        ConfigError: An option does not fit the others.
    """
    replica = options.pop("replica", None)
    document = {"at_s": 0.0, "replicas": [] if replica is None else [replica], **options}
    try:
        config = ChaosConfig(**document)
    except ValidationError as error:
        problem = explain(error, ChaosConfig, document)
        key = problem.key.partition(".")[0]
        if key == "replicas" and replica is None:
            raise ConfigError("--replica", None, "the id of a replica") from None
        option = _OPTIONS.get(key, f"--{key.replace('_', '-')}")
        raise ConfigError(option, problem.value, problem.allowed) from None
    return injection_of(config, replica, 0, "chaos by hand")


def _replica_on(run: RunDir, injection: Injection) -> int:
    """Return the replica whose ranks on the named host are hit. Raises ConfigError unless there is one."""
    if injection.kind != fault_injection.HOST:
        raise ConfigError("--host", injection.host, "only with --kind host")
    if injection.replica is not None:
        return injection.replica
    listed = {n: read_json(run.processes(n)) or {"ranks": []} for n in run.replicas()}
    found = [n for n, one in listed.items() if any(r["host"] == injection.host for r in one["ranks"])]
    if not found:
        there = sorted({str(r["host"]) for one in listed.values() for r in one["ranks"]})
        raise ConfigError("--host", injection.host, f"one of {there}")
    if len(found) > 1:
        raise ConfigError("--replica", None, f"one of {found}: all have ranks on {injection.host}")
    return found[0]


def inject_by_hand(run: RunDir, injection: Injection) -> Row:
    """Inject a failure into a running job and return its event. Blocks until a failure with an end is lifted.

    The event is written to replicas/<id>/chaos.jsonl, which the job's supervisor merges like any other log.

    Raises:
        ConfigError: As `inflict`; or the job does not have debug.faults, which this kind needs.
    """
    if injection.kind in fault_injection.HOOKED and not load(run.config).takes_faults:
        allowed = "one that a process need not carry out itself, unless the job has debug.faults: true"
        raise ConfigError("--kind", injection.kind, allowed)
    if injection.host is not None:
        injection = replace(injection, replica=_replica_on(run, injection))
    where = injection.replica if injection.replica is not None else run.replicas()[0]
    made = inflict(run, injection)
    log = LineWriter(run.injections(where))
    try:
        log.write(made.event)
        if made.lift is not None and injection.for_s > 0:
            try:
                time.sleep(injection.for_s)
            finally:  # after Ctrl-C too
                log.write(made.lifted(f"{injection.for_s:g} s are over"))
    finally:
        log.close()
    return made.event
