"""Programs that are not Python's: a test that wants one is skipped where there is none, but in CI."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, package: str) -> str:
    """The path of ``name``, which is in Debian's ``package``; with FT_HSDP_SKIP_NOTHING=1 nothing is skipped."""
    found = shutil.which(name)
    if found is None:
        why = f"{name} is not installed (Debian: apt-get install {package})"
        if os.environ.get("FT_HSDP_SKIP_NOTHING") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return found
