"""`submit` with steps that take time, but no CPU: `python ray_slow.py CONFIG --ray-address A [--KEY=...]`.

Once there is a file `hurry` beside ray.folder, they take none. A rank on a host for which there is a file
`broken-HOST` ends with 76.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from ft_hsdp.config import Config, load
from ft_hsdp.errors import EXIT_HARDWARE
from ft_hsdp.train.identity import HOST_VARIABLE

STEP_S = 0.8


class Slow:
    """Data whose batches take their time to come."""

    def __init__(self, data: Any, hurry: Path) -> None:
        self._data = data
        self._hurry = hurry

    def batch(self, *where: int) -> Any:
        if self._hurry.with_name(f"broken-{os.environ[HOST_VARIABLE]}").exists():
            os._exit(EXIT_HARDWARE)
        if not self._hurry.exists():
            time.sleep(STEP_S)
        return self._data.batch(*where)


def main(config: Config, calling: Any, run: Path) -> int:
    """One rank of the trainer that comes with ft_hsdp, with slow batches."""
    from ft_hsdp.launch.backend import entry
    from ft_hsdp.train import trainer

    data, hurry = trainer.dataset, Path(config.ray.folder).parent / "hurry"
    trainer.dataset = lambda config: Slow(data(config), hurry)  # type: ignore[assignment]
    return int(entry.main(config, calling, run))


if __name__ == "__main__":
    from ft_hsdp.launch.ray.submit import submit

    config = load(Path(sys.argv[1]), sys.argv[4:])
    sys.exit(submit(config, sys.argv[3], entry="tests.support.launch.ray_slow:main")[0])
