"""Steps that take time, but no CPU, until there is a file `hurry`: a job lasts as long as a test wants."""

import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOSS = "loss = model(batch)"


def pause(seconds: float) -> None:
    """Sleep, unless there is a file `hurry` in the working directory."""
    if not Path("hurry").exists():
        time.sleep(seconds)


def write_slow_script(script: Path, hurry: Path, step_s: float) -> None:
    """Write the loop of docs/examples/own_loop.py as a script.

    Args:
        script: Where to.
        hurry: The file.
        step_s: How long a step takes before that is there.
    """
    wait = f"if not __import__('os').path.exists({str(hurry)!r}): __import__('time').sleep({step_s})"
    whole = (ROOT / "docs" / "examples" / "own_loop.py").read_text()
    assert whole.count(LOSS) == 1
    script.write_text(whole.replace(LOSS, f"{wait}\n        {LOSS}"))
