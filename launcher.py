"""`python launcher.py ...` is `ft-hsdp ...`."""

from ft_hsdp.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
