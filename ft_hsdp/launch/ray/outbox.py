"""Outbox: what the files of an actor's run directory have gained, on its node; the driver takes it from here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT = 1 << 20  # bytes that are held at once
REPLACED = "final.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is added to a file, or the new content of one that is replaced as a whole.

    name: its path in the run directory, with slashes.
    """

    name: str
    data: bytes


class Outbox:
    """The logs of replicas and spares in the folder `run`. A line that is not whole yet waits.

    others: file -> the name under which it is sent.
    """

    def __init__(self, run: Path, others: Mapping[Path, str]) -> None:
        self._run = run
        self._others = others
        self._sent: dict[Path, int] = {}  # how much of each log
        self._replaced: dict[Path, tuple[int, int]] = {}  # what each REPLACED looked like when it was sent

    def take(self, *, flush: bool) -> tuple[list[Piece], bool]:
        """What is new, and whether that is all of it. flush: nobody writes any more, parts of lines are whole."""
        pieces: list[Piece] = []
        size = 0
        logs, finals = self._files()
        for file in logs:
            if size >= LIMIT:
                return pieces, False
            data = self._read(file, flush=flush)
            if data:
                pieces.append(Piece(self._name(file), data))
                size += len(data)
        changed = filter(None, map(self._final, finals))
        return [*pieces, *changed], size < LIMIT

    def _files(self) -> tuple[list[Path], list[Path]]:
        """The logs, of which those that are audited come first, and what is replaced as a whole."""
        audited, logs, finals = [], [], []
        replicas = self._run / "replicas"
        for folder in (*(replicas / replica for replica in _names(replicas)), self._run / "spares"):
            for name in _names(folder):
                if name.endswith(".jsonl"):
                    audited.append(folder / name)
                elif name.endswith(".log"):
                    logs.append(folder / name)
                elif name == REPLACED:
                    finals.append(folder / name)
        return [*audited, *logs, *self._others], finals

    def _name(self, file: Path) -> str:
        return self._others.get(file) or file.relative_to(self._run).as_posix()

    def _read(self, file: Path, *, flush: bool) -> bytes:
        start = self._sent.get(file, 0)
        try:
            if file.stat().st_size <= start:
                return b""
            with file.open("rb") as log:
                log.seek(start)
                data = log.read(LIMIT)
        except OSError:
            return b""
        whole = data.rfind(b"\n") + 1
        if len(data) == LIMIT:
            data = data[: whole or LIMIT]  # a line longer than that goes in parts
        elif not flush:
            data = data[:whole]
        self._sent[file] = start + len(data)
        cut = flush and len(data) < LIMIT and not data.endswith(b"\n")
        return data + b"\n" if cut else data

    def _final(self, file: Path) -> Piece | None:
        try:
            info = file.stat()
            mark = (info.st_ino, info.st_mtime_ns)
            if mark == self._replaced.get(file):
                return None
            data = file.read_bytes()
        except OSError:
            return None
        self._replaced[file] = mark
        return Piece(self._name(file), data)


def _names(folder: Path) -> list[str]:
    """What is in a folder, sorted; nothing where there is none."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
