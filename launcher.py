"""The command line from a checkout: `python launcher.py COMMAND ...`, installed as `ft-hsdp`."""

from ft_hsdp.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
