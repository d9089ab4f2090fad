"""Durations are measured on monotonic clocks: a wall clock that jumps must not look like a silence."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Logs, and lines for people; the first term of an empty store, which only has to be new; and the clock's doctor.
WALL = {
    "ft_hsdp/ftar/allreduce.py",  # when some all-reduces began, to compare hosts
    "ft_hsdp/jsonl.py",
    "ft_hsdp/launch/doctor/network.py",
    "ft_hsdp/train/step_log.py",
    "ft_hsdp/launch/job.py",
    "ft_hsdp/launch/injection.py",
    "ft_hsdp/launch/run/directory.py",  # events of supervisors; how long ago another host changed a file
    "ft_hsdp/launch/run/recorder.py",
    "ft_hsdp/launch/ray/logs.py",
    "ft_hsdp/train/job.py",
    "ft_hsdp/train/identity.py",
    "lighthouse/__main__.py",  # events before there is a service
    "lighthouse/ha/candidate.py",
    "lighthouse/service.py",
    "lighthouse/store.py",
}


def reads_the_wall_clock(file: Path) -> bool:
    calls = (n.func for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call))
    names = {ast.unparse(f) for f in calls}
    return bool(names & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"})


def test_only_logs_know_the_time_of_day() -> None:
    files = [p for top in ("ft_hsdp", "lighthouse", "ftar_kernels") for p in (ROOT / top).rglob("*.py")]
    found = {str(p.relative_to(ROOT)) for p in files if reads_the_wall_clock(p)}
    assert found == WALL
