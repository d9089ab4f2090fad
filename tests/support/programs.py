"""Programs that are not Python's, and what is said of tests that cannot run here."""

import shutil
from typing import NoReturn

import pytest

INAPPLICABLE = "this case does not exist: "


def program(name: str, package: str) -> str:
    """The path of ``name``, which is in Debian's ``package``; without it the test is skipped."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return found


def inapplicable(why: str) -> NoReturn:
    """Leave out one combination of parameters that has no meaning; this is no skip for want of something."""
    pytest.skip(INAPPLICABLE + why)
