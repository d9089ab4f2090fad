"""What ranks do in the tests of their supervision: what plan.json in the run's folder says.

plan.json: {"<replica>": {"<restart>": {"<rank>": action}}}; an action is a list of words; without one, wait.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.rundir import RunDir, write_json


def main(config: Config, replica: int, run: Path) -> int:
    plan = json.loads((run / "plan.json").read_text()) if (run / "plan.json").exists() else {}
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    action = plan.get(str(replica), {}).get(restart, {}).get(os.environ["RANK"], ["wait"])
    print(f"rank {os.environ['RANK']} of {config.replicas} replicas: {action}")
    match action:
        case ["exit", code]:
            return int(code)
        case ["final"]:
            write_json(RunDir(run).final(replica), {"step": 1})
            return 0
        case ["exit-when", name, code]:
            deadline = time.monotonic() + 30
            while not (run / name).exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            return int(code)
        case ["raise"]:
            raise RuntimeError("on purpose")
        case ["bad-config"]:
            raise ConfigError("model.dim", 3, "another number")
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["deaf"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (run / f"waiting-{replica}-{restart}-{os.environ['RANK']}").touch()
    print("waiting", file=sys.stderr)
    time.sleep(60)
    return 1
