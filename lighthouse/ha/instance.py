"""Which of the lighthouses of one run directory this process is, and where the others listen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import clear_way, read_object, read_regular, replace_json, set_aside
from ft_hsdp.lifetime import identity

MAX_INSTANCES = 5


class InstanceLock:
    """The number of a lighthouse in its run directory, by default the first free one; held until the process ends.

    Raises:
        ConfigError: the number, or each of them, is taken.
    """

    def __init__(self, run: Path, number: int | None = None) -> None:
        self._run = run
        self._folder = run / "lighthouse"
        self._folder.mkdir(parents=True, exist_ok=True)
        for free in range(MAX_INSTANCES) if number is None else (number,):
            file = self._folder / f"seat-{free}.lock"
            clear_way(file)
            lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                self.number = free
                return
            os.close(lock)
        wanted = f"a free one of 0 to {MAX_INSTANCES - 1}"
        raise ConfigError("--seat", "any" if number is None else number, f"{wanted} (other lighthouses have them)")

    @property
    def database_path(self) -> Path:
        return self._folder / ("journal.sqlite" if self.number == 0 else f"journal-{self.number}.sqlite")

    def run_id(self, first: str) -> str:
        """Return what tells this run from others of the same job name: ``first`` at the first call."""
        file = self._folder / "run_id"
        clear_way(file)
        try:
            with file.open("x", encoding="utf-8") as made:
                made.write(first)
            return first
        except FileExistsError:
            said = read_regular(file).decode(errors="replace")
        if re.fullmatch(r"[0-9a-f]{16}", said):
            return said
        set_aside(file)
        return self.run_id(first)

    def named(self, url: str) -> None:
        """Write where this lighthouse listens, unless that is written. Raises OSError."""
        file, said = self._folder / f"seat-{self.number}.json", {"pid": os.getpid(), "url": url}
        if read_object(file) != said:
            replace_json(file, said)

    def leads(self, url: str) -> None:
        """Write that this lighthouse leads, and where all of them listen, unless it is written. Raises OSError."""
        urls = [read_object(self._folder / f"seat-{n}.json").get("url") for n in range(MAX_INSTANCES)]
        every = list(dict.fromkeys(u for u in (url, *urls) if isinstance(u, str)))
        said = {**identity(), "url": url, "urls": every}
        if read_object(self._run / "lighthouse.json") != said:
            replace_json(self._run / "lighthouse.json", said)
        self.named(url)  # the directory may have failed since this one began to stand by

    def free(self) -> None:
        os.close(self._lock)
