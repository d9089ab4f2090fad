"""`python -m ft_hsdp.launch.spare PID PACKAGE [ARGS]`: a package that is loaded, and runs when stdin has a line.

Loading is most of the time that a lighthouse needs to start. Like what `tied` runs, it dies with PID.
"""

from __future__ import annotations

import importlib
import os
import sys

from ft_hsdp.launch.processes import die_with


def main() -> None:
    """Load the package's program, wait, and run its `main`; end where nobody wants it any more."""
    parent, package, *args = sys.argv[1:]
    if os.getpid() != os.getsid(0):
        os.setsid()
    die_with(int(parent))
    loaded = importlib.import_module(f"{package}.__main__")
    if sys.stdin.readline():
        sys.argv = [package, *args]
        sys.exit(loaded.main())


if __name__ == "__main__":
    main()
