"""Versions: of what is installed, against what this package asks for."""

from __future__ import annotations

import platform
import re
from importlib import metadata

from ft_hsdp.launch.doctor.finding import Bad, Subject, Undecided


def installed(_: Subject) -> str:
    """torch's version, if it is new enough."""
    try:
        have = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise Bad("torch is not installed; `make venv` does it, or pip install torch") from None
    least = lower_bound("torch", asked_for())
    text = f"torch {have}, Python {platform.python_version()}"
    if numbers(have) < numbers(least):
        raise Bad(f"{text}; torch must be {least} or newer: pip install 'torch>={least}'")
    return f"{text}; torch {least} or newer is asked for"


def asked_for() -> list[str]:
    """What this package requires, one line each. Raises Undecided."""
    try:
        return metadata.requires("ft_hsdp") or []
    except metadata.PackageNotFoundError:
        raise Undecided("ft_hsdp runs from a folder and is not installed: what it requires is not known") from None


def lower_bound(package: str, requirements: list[str]) -> str:
    """The X of `package>=X`. Raises Undecided where there is none."""
    for line in requirements:
        found = re.fullmatch(rf"{re.escape(package)}\s*>=\s*([0-9][0-9.]*)", line.partition(";")[0].strip())
        if found:
            return found[1]
    raise Undecided(f"nothing is said of the oldest {package} that will do")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to be compared: (2, 13, 0) of 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))
