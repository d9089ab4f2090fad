"""Children: what may hang or must not stay in this process is asked of a module that runs in one of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from ft_hsdp.launch.doctor.finding import Undecided
from ft_hsdp.launch.processes import environment, tied

CHILD_S = 18.0  # less than an examination may take


def ask(module: str, *args: str, env: Mapping[str, str | None] | None = None) -> dict[str, Any]:
    """The JSON object that `module` prints as its last line; `env` changes its environment, None takes away.

    It dies with this process, and after `CHILD_S` seconds. Raises Undecided.
    """
    changed = {**environment(), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
    try:
        done = subprocess.run(
            tied(module, *args),
            env={name: value for name, value in changed.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHILD_S,
        )
    except subprocess.TimeoutExpired:
        raise Undecided(f"no answer within {CHILD_S:g} s; try again, the first time is the slowest") from None
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        answer = None
    if isinstance(answer, dict):
        return answer
    last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
    raise Undecided(f"the check itself failed: {last[:200]}")
