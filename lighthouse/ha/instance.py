"""Seat: which of the lighthouses of one run directory this one is, and where the others listen."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import here, replace_json

SEATS = 5


class InstanceLock:
    """The first free seat of the run in ``run``, or seat ``number``; held until this process ends.

    Raises ConfigError: it is taken.
    """

    def __init__(self, run: Path, number: int | None = None) -> None:
        self._run = run
        self._folder = run / "lighthouse"
        self._folder.mkdir(parents=True, exist_ok=True)
        for free in range(SEATS) if number is None else (number,):
            lock = os.open(self._folder / f"seat-{free}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                self.number = free
                return
            os.close(lock)
        wanted = f"a free one of 0 to {SEATS - 1}"
        raise ConfigError("--seat", "any" if number is None else number, f"{wanted} (other lighthouses have them)")

    @property
    def archive(self) -> Path:
        """The journal of this seat."""
        return self._folder / ("journal.sqlite" if self.number == 0 else f"journal-{self.number}.sqlite")

    def run_id(self, first: str) -> str:
        """What tells this run from others of the job's name: ``first`` when it is asked for the first time."""
        file = self._folder / "run_id"
        try:
            with file.open("x") as made:
                made.write(first)
            return first
        except FileExistsError:
            return file.read_text() or first

    def named(self, url: str) -> None:
        """Say where this lighthouse listens."""
        write(self._folder / f"seat-{self.number}.json", {"pid": os.getpid(), "url": url})

    def leads(self, url: str) -> None:
        """Say in lighthouse.json that this one leads, and where all are."""
        urls = [read(self._folder / f"seat-{n}.json").get("url") for n in range(SEATS)]
        every = list(dict.fromkeys(u for u in (url, *urls) if isinstance(u, str)))
        said = {"pid": os.getpid(), "url": url, "urls": every, **here()}
        if read(self._run / "lighthouse.json") != said:
            write(self._run / "lighthouse.json", said)

    def free(self) -> None:
        """Let another lighthouse have the seat."""
        os.close(self._lock)


def read(file: Path) -> dict[str, object]:
    """The object in a JSON file; an empty one where there is none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(file: Path, value: object) -> None:
    """Replace a file by ``value`` as JSON: a reader sees the old one or the new one, whole. Raises OSError."""
    replace_json(file, value)
