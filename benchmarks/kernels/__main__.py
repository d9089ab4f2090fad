"""`python -m benchmarks.kernels [--out FOLDER] [--budget S] [--only SECTION ...]`: checks and measures kernels.

It needs no package registry: any Python with torch, triton and what ft_hsdp imports will do. Each section runs in
a process of its own under a limit; one that hangs is killed with all its children, and its stacks are in its log.
FOLDER/results.json is complete after each section. Without a GPU the sections that need one are named, and the
compile check and the interpreter's checks run. The exit code is 1 if a check failed; a figure that misses its goal
is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.kernels.sections import ROOT, SECTIONS

LEAST_S = 10.0  # a section that has less is not begun
FREE_S = 15.0  # how long a device may take to forget a killed process
STACKS_S = 2.0  # how long a section may take to write its stacks


def run(name: str, limit_s: float, out: Path) -> dict[str, Any]:
    """Run one section in a process of its own; an error becomes a part of the result."""
    begin, result = time.monotonic(), out / f".{name}.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"BENCH_OUT": str(out), "PYTHONUNBUFFERED": "1", **SECTIONS[name].environment}
    environment["PYTHONFAULTHANDLER"] = "1"  # SIGABRT writes the stacks, before the first import, too
    command = [sys.executable, "-m", "benchmarks.kernels", "--section", name, "--out", str(out)]
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(limit_s)
            failed = f"exit {process.returncode}: {(out / log.name).read_text(errors='replace')[-1000:]}"
        except subprocess.TimeoutExpired:
            failed = f"not finished after {limit_s:.0f} s"
            process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            process.wait()
    found = json.loads(result.read_text()) if result.exists() else {"ok": False, "error": failed}
    result.unlink(missing_ok=True)
    return {**found, "seconds": round(time.monotonic() - begin, 1)}


def section(name: str, out: Path) -> None:
    """Do the work of one section in this process, and write its result."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        found = SECTIONS[name].work()
    except Exception as error:
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:800]}
    (out / f".{name}.json").write_text(json.dumps(found, default=str))
    sys.stderr.flush()
    os._exit(0)  # a thread that hangs in the driver must not keep the process


def still_used() -> str:
    """Wait until no process uses the device; return the ids of those that still do after `FREE_S`."""
    until = time.monotonic() + FREE_S
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    while True:
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.split()
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if not told or time.monotonic() > until:
            return ",".join(told)
        time.sleep(0.5)


def lines(name: str, result: dict[str, Any]) -> str:
    """Format the result of a section for the terminal."""
    goal = f"  goal: {SECTIONS[name].goal}" if SECTIONS[name].goal else ""
    state = "skipped" if "skipped" in result else "ok" if result["ok"] else "FAILED"
    text = f"{name}: {state}{goal}"
    rows = result.get("rows", [])
    text += "".join(f"  {k} {_short(v)}" for k, v in result.items() if k not in ("ok", "rows", "machine")) + "\n"
    return text + "".join("    " + "  ".join(f"{k} {_short(v)}" for k, v in row.items()) + "\n" for row in rows)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {_short(v)}" for k, v in value.items()) + "}"
    return str(value)


def main(arguments: list[str]) -> int:
    """Run all sections, or those of `--only`, and print their results; return 1 if one failed."""
    parser = argparse.ArgumentParser("python -m benchmarks.kernels", description="Check and measure the kernels.")
    parser.add_argument("--out", metavar="FOLDER", default="runs/kernels", help="for results and logs")
    parser.add_argument("--budget", metavar="S", type=float, default=3600.0, help="seconds for all sections")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.section:
        section(options.section, out)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, "triton": triton.__version__}
    report["date"] = time.strftime("%Y-%m-%d")
    until, results = time.monotonic() + options.budget, dict[str, Any]()
    for name, each in SECTIONS.items():
        if name not in (options.only or [n for n, s in SECTIONS.items() if s.gpu or device is None]):
            continue
        left = until - time.monotonic()
        if each.gpu and device is None:
            sys.stdout.write(f"{name}: needs a GPU, {each.limit_s:.0f} s at most. {each.what}\n")
            continue
        if left < LEAST_S:
            sys.stdout.write(f"{name}: not begun, {left:.0f} s are left\n")
            continue
        results[name] = found = run(name, min(each.limit_s, left), out)
        (out / "results.json").write_text(json.dumps({**report, "sections": results}, indent=1) + "\n")
        sys.stdout.write(lines(name, found))
        sys.stdout.flush()
        if each.gpu and (pids := still_used()):
            sys.stdout.write(f"stop: processes {pids} do not leave the device\n")
            return 1
    return 0 if all(found["ok"] for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
