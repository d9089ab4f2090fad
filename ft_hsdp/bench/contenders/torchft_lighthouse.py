"""torchft's lighthouse: `torchft_lighthouse FILE [HEARTBEAT_MS JOIN_MS [MEMBERS]]`, as a module.

Writes its URL to FILE and serves until it is killed; without times it has those of torchft's own command, and
without MEMBERS, the fewest that make a quorum, one is enough.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchft.coordination import LighthouseServer

from ft_hsdp.launch.run.directory import write_json


def main(argv: Sequence[str]) -> None:
    """Serve until this process is killed."""
    file, *numbers = argv
    names = ("heartbeat_timeout_ms", "join_timeout_ms", "min_replicas")
    given = dict(zip(names, map(int, numbers), strict=False))
    server = LighthouseServer(bind="127.0.0.1:0", **{"min_replicas": 1, **given})
    write_json(Path(file), {"url": server.address()})
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
