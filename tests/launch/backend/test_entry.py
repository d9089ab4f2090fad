"""What runs in a rank: a user's script as Python would run it, its exit code, and the last line of its log."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ft_hsdp.launch.backend.processes import environment

# Runs each case in a fork of its own, as the fork server does, in a folder of its own.
FORKS = """
import json, os, sys, time
from pathlib import Path
from ft_hsdp.config import parse
from ft_hsdp.core.restart import IncarnationId
from ft_hsdp.launch.backend import entry

class Called:
    def poll(self):
        return IncarnationId(0, "a", 0)
    wait = poll

for name, document in json.loads(sys.argv[1]).items():
    if (pid := os.fork()) == 0:
        log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.pop("RANK", None)
        source = 0 if name == "torchrun" else Called()
        code = entry.main(parse(document), source, Path("run"))
        sys.stdout.flush()
        os._exit(code)
    print(json.dumps([name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
"""
JOINED = "from ft_hsdp.train import join\njoin._process.asked = True\n"
NEVER = "has ended and never called ft_hsdp.join(): each rank has to join the job"
PARSES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', required=True)\np.parse_args()"
SCRIPTS: dict[str, tuple[str, int, str]] = {
    # name: the script, its exit code, the last line of its log
    "early": ("print('hello')", 64, f"early.py {NEVER}"),
    "early0": ("import sys; sys.exit(0)", 64, f"early0.py {NEVER}"),
    "raises": ("raise ValueError('one\\ntwo \\x1b[31m')", 64, "raises.py: ValueError: one two [31m"),
    "missing": ("import no_such_module", 64, "missing.py: ModuleNotFoundError: No module named 'no_such_module'"),
    "disk": ("open('/nowhere/x')", 75, "disk.py: FileNotFoundError: [Errno 2] No such file or dire"),
    "device": ("raise RuntimeError('out of memory')", 75, "device.py: RuntimeError: out of memory"),
    "later": (f"{JOINED}raise KeyError('x')", 75, "later.py: KeyError: 'x'"),
    "ours": ("import ft_hsdp\nraise ft_hsdp.ConfigError('a', 1, 'b')", 64, "a: got 1; allowed: b"),
    "usage": (PARSES, 2,
              "usage.py: error: the following arguments are required: --lr"),
    "message": ("import sys; sys.exit('no more')", 1, "no more"),
    "seven": (f"{JOINED}import sys; sys.exit(7)", 7, ""),
    "alone": ("import ft_hsdp\nft_hsdp.join()", 69, "the run has no lighthouse within 0.1 s: no "),
    "given": ("import ft_hsdp\nft_hsdp.join('a.yaml', 0)", 64,
              "ft_hsdp.join(config): got 'a.yaml'; allowed: no argument, as the launcher of this job's entry has"),
    "torchrun": ("import time\ndef wait_for_ever():\n    time.sleep(60)\nwait_for_ever()", 75,
                 "torchrun.py has not called ft_hsdp.join() within 0.3 s (timeouts.start_s)"),
}  # fmt: skip
AS_PYTHON = f"""{JOINED}
import atexit, os, sys, threading, time
import beside

class Local:
    pass

assert sys.modules["__main__"].Local is Local
print(sys.argv, __name__, os.path.basename(__file__), beside.NAME)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread ends"))).start()
os.chdir("/")
"""
FAST = dict.fromkeys(("start_s", "ranks_s", "connect_s"), 0.3)
FAST |= dict.fromkeys(("silence_s", "reach_s"), 0.1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """The folder with the logs of all cases, and their exit codes."""
    folder = tmp_path_factory.mktemp("entries")
    cases: dict[str, dict[str, Any]] = {}
    for name, (body, _, _) in SCRIPTS.items():
        (folder / f"{name}.py").write_text(body)
        cases[name] = {"entry": f"{name}.py", "timeouts": FAST}
    (folder / "sub").mkdir()
    (folder / "sub" / "python.py").write_text(AS_PYTHON)
    (folder / "sub" / "beside.py").write_text("NAME = 'found beside it'")
    cases["python"] = {"entry": "sub/python.py", "args": ["--width", "3"]}
    (folder / "loop.py").write_text(f"{JOINED}import sys\ndef main():\n    print(sys.argv)\n    return 5\n")
    cases["function"] = {"entry": "loop:main", "args": ["x"]}
    cases["nothing"] = {"entry": "loop:mian"}
    words = [sys.executable, "-c", FORKS, json.dumps(cases)]
    done = subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, dict(map(json.loads, done.stdout.splitlines()))


def log(ran: tuple[Path, dict[str, int]], name: str) -> list[str]:
    return (ran[0] / f"{name}.log").read_text().splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_exit_code_and_the_last_line_say_why_a_script_ended(ran, name) -> None:
    _, code, line = SCRIPTS[name]
    lines = log(ran, name)
    assert (ran[1][name], line) == (code, (lines or [""])[-1][: len(line)])


def test_a_traceback_begins_with_the_users_own_lines(ran: tuple[Path, dict[str, int]]) -> None:
    lines = log(ran, "later")
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip().startswith(f'File "{ran[0]}/later.py", line 3')
    assert "wait_for_ever" in "\n".join(log(ran, "torchrun")), "where it hangs"


def test_a_script_runs_as_python_would_run_it(ran: tuple[Path, dict[str, int]]) -> None:
    lines = log(ran, "python")
    first = f"['{ran[0]}/sub/python.py', '--width', '3'] __main__ python.py found beside it"
    assert (ran[1]["python"], lines) == (0, [first, "a thread ends", "at exit"])


def test_a_function_is_called_as_a_console_script_is(ran: tuple[Path, dict[str, int]]) -> None:
    assert (ran[1]["function"], log(ran, "function")) == (5, ["['loop:main', 'x']"])
    assert log(ran, "nothing")[-1].startswith("loop:mian: AttributeError: ")
    assert os.getcwd() not in log(ran, "nothing")[-1]
