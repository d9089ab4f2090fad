"""Secrets: the tokens of a job in files that only their owner reads, or in the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ft_hsdp.errors import ConfigError

_TOKEN = re.compile(r"[!-~]{8,256}")
_ALLOWED = "a file of one token, or of two: the current one and another that is accepted, too"


def read(file: Path, variable: str) -> tuple[str, ...]:
    """The tokens in ``file``, the current one first; else the one in the environment's ``variable``; else none.

    Raises:
        ConfigError: what is there cannot be used; the line names the file and never shows what is in it.
    """
    try:
        lines = tuple(file.read_text(encoding="ascii").split())
    except FileNotFoundError:
        return tuple(os.environ.get(variable, "").split()[:2])
    except UnicodeError:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} (it is not ASCII text)") from None
    except OSError as error:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} ({error.strerror})") from None
    if not lines:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} (it is empty)")
    if len(lines) > 2 or not all(map(_TOKEN.fullmatch, lines)):
        raise ConfigError(file.name, str(file), f"{_ALLOWED}, each of 8 to 256 visible characters")
    return lines


def current(file: Path) -> str:
    """The token in ``file`` that is to be used. Raises OSError, or ConfigError for a file without one."""
    lines = file.read_text(encoding="ascii", errors="replace").split()
    if not lines:
        raise ConfigError(file.name, str(file), f"{_ALLOWED} (it is empty)")
    return lines[0]
