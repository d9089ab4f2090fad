"""Shared by the tests of compatibility."""

from tests.train.conftest import mesh

__all__ = ["mesh"]
