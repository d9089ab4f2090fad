"""Shared by the tests of benches that start whole jobs."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running import running

MARK = "FT_HSDP_TEST_MARK"
TORCH = "torchinductor"  # a folder that torch makes as soon as it is imported


@pytest.fixture
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Afterwards no process and no file of what was run is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # not in tmp_path: too long for the paths of sockets
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield
        deadline = time.monotonic() + 10
        while left := _marked(mark):  # state agents see the end of their job, and end
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        assert [file for file in Path(folder).iterdir() if not file.name.startswith(TORCH)] == []


def _marked(mark: str) -> list[list[str]]:
    """The command lines of processes that run with this mark in their environment."""
    return list(running(mark=(MARK, mark)).values())
