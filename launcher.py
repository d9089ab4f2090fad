"""The command line from a checkout: `python launcher.py COMMAND ...`, installed as `ft-hsdp`."""

import sys

try:
    from ft_hsdp.launch.cli import main
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] in ("ft_hsdp", "lighthouse"):
        raise
    found = f"launcher.py: {sys.executable} has no module {error.name}"
    sys.stderr.write(f"{found}: run `. .venv/bin/activate` first, or `make venv` if there is no .venv\n")
    raise SystemExit(64) from None

if __name__ == "__main__":
    raise SystemExit(main())
