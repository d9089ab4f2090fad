"""`python -m ft_hsdp.launch.tied PID MODULE [ARGS]`: run a module that the kernel kills when PID dies.

It leads a session of its own, so that Ctrl-C in a terminal reaches only the process that knows what to do.
"""

from __future__ import annotations

import os
import sys

from ft_hsdp.launch.processes import die_with


def main() -> None:
    """Tie this process to its parent and become the module."""
    parent, module, *args = sys.argv[1:]
    if os.getpid() != os.getsid(0):
        os.setsid()
    die_with(int(parent))
    os.execv(sys.executable, [sys.executable, "-m", module, *args])  # noqa: S606 - no shell is what we want


if __name__ == "__main__":
    main()
