"""What ranks do in the tests of their supervision: what plan.json in the run's folder says.

plan.json: {"<replica>": {"<restart>": {"<rank>": action}}}; an action is a list of words; without one, wait.
{"spare": {"<rank>": action}} is what the ranks of spares do before they are called.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import replace_json
from ft_hsdp.launch.run.directory import RunDir
from ft_hsdp.train.identity import FATAL_VARIABLE, HOST_VARIABLE, IncarnationSource


def before_a_call(plan: dict[str, list[Any]], run: Path) -> None:
    with (run / "spares-made").open("a") as file:
        file.write(f"{os.getpid()}\n")
    match plan.get(os.environ["RANK"]):
        case ["exit", code]:
            sys.exit(code)
        case ["hang"]:
            time.sleep(60)
        case ["until", name]:
            wait_for(run / name)


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def main(config: Config, calling: IncarnationSource, run: Path) -> int:
    plan = json.loads((run / "plan.json").read_text()) if (run / "plan.json").exists() else {}
    if calling.poll() is None:
        before_a_call(plan.get("spare", {}), run)
    replica, restart = calling.wait().replica, os.environ["TORCHELASTIC_RESTART_COUNT"]
    action = plan.get(str(replica), {}).get(restart, {}).get(os.environ["RANK"], ["wait"])
    print(f"rank {os.environ['RANK']} of {config.replicas} replicas: {action}", os.environ.get(FATAL_VARIABLE, ""))
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        print(f"on GPU {os.environ['LOCAL_RANK']} of {os.environ['CUDA_VISIBLE_DEVICES']}")
    match action:
        case ["exit", code]:
            return int(code)
        case ["final", of_job, *when]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for name in when:
                (run / f"{name}-awaited-{os.environ['RANK']}").touch()
                wait_for(run / name)
            said = {"step": 1, "incarnation": str(calling.poll()), "of_job": of_job}
            replace_json(RunDir(run).final(replica), said)
            return 0
        case ["exit-when", name, code]:
            wait_for(run / name)
            return int(code)
        case ["raise", kind, *facts]:
            raise {"key": KeyError, "os": OSError, "memory": MemoryError}[kind](*facts)
        case ["bad-config"]:
            raise ConfigError("model.dim", 3, "another number")
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["family"]:
            _leave_behind(run / f"family-{replica}-{restart}-{os.environ['RANK']}")
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run / f"host-{replica}-{os.environ['RANK']}").write_text(os.environ.get(HOST_VARIABLE, ""))
    (run / f"waiting-{replica}-{restart}-{os.environ['RANK']}").touch()
    print("waiting", file=sys.stderr)
    time.sleep(60)
    return 1


TELL = r"os.write(1, b'%d\n' % os.getpid())"  # in one piece: others write there, too
STAY = f"import os, time; {TELL}; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {STAY}"
ORPHAN = f"""
import os
if os.fork():
    os._exit(0)
open("/proc/self/comm", "wb").write("обучение.sh".encode())  # the kernel cuts this within a letter
{STAY}
"""
PARENT = f"""
import os, subprocess, sys
{TELL}
subprocess.run([sys.executable, "-c", {STAY!r}], env={{}})
"""


def _leave_behind(file: Path) -> None:
    """Start processes of each kind that a script may start, and write down the pids of all."""
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    reader, writer = os.pipe()
    for text in (DEAF, PARENT):
        subprocess.Popen([sys.executable, "-c", text], stdout=writer, start_new_session=True)
    subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=writer)
    with os.fdopen(reader) as pids:
        file.write_text(f"{forked} {' '.join(pids.readline().strip() for _ in range(4))}")
