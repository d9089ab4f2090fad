"""Copies the files that ranks write on their nodes to the run directory of the driver.

`LogSender` runs in each actor and returns what was added to the files of its folder. `LogReceiver` runs in the
driver and appends that to files of the same names.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ft_hsdp.jsonl import Lost, clear_way, open_regular, read_regular

LIMIT = 1 << 20  # bytes that one answer takes from logs, about
REPLACED = "final.json"


@dataclass(frozen=True, slots=True)
class LogPiece:
    """What is added to a log, or the new content of a file that is replaced as a whole."""

    name: str  # path in the run directory, with slashes
    data: bytes


class LogSender:
    """Reads what is new in the logs of replicas and spares. It sends a line when the line is complete."""

    def __init__(self, run: Path, others: Mapping[Path, str]) -> None:
        """Read the files of a folder from their beginning.

        Args:
            run: The folder of the actor, laid out as a run directory.
            others: Further files, and the names under which they are sent.
        """
        self._run = run
        self._others = others
        self._sent: dict[Path, int] = {}  # bytes of each log
        self._replaced: dict[Path, tuple[int, int]] = {}  # inode and mtime of each REPLACED when it was sent

    def take(self, *, flush: bool) -> tuple[list[LogPiece], bool]:
        """Return what is new, and whether that is all.

        Args:
            flush: The writers have ended, so incomplete lines are sent as well.
        """
        pieces: list[LogPiece] = []
        size = 0
        logs, finals = self._files()
        for file in logs:
            if size >= LIMIT:
                return pieces, False
            data = self._read(file, flush=flush)
            if data:
                pieces.append(LogPiece(self._name(file), data))
                size += len(data)
        changed = filter(None, map(self._final, finals))
        return [*pieces, *changed], size < LIMIT

    def _files(self) -> tuple[list[Path], list[Path]]:
        """Return the logs, the audited ones first, and the files that are replaced as a whole."""
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
            with open_regular(file) as log:
                log.seek(start)
                data = log.read(LIMIT)
        except OSError:
            return b""
        whole = data.rfind(b"\n") + 1
        if len(data) == LIMIT:
            data = data[: whole or LIMIT]  # a line longer than LIMIT is sent in parts
        elif not flush:
            data = data[:whole]
        self._sent[file] = start + len(data)
        cut = flush and len(data) < LIMIT and not data.endswith(b"\n")
        return data + b"\n" if cut else data

    def _final(self, file: Path) -> LogPiece | None:
        try:
            info = file.stat()
            mark = (info.st_ino, info.st_mtime_ns)
            if mark == self._replaced.get(file):
                return None
            data = read_regular(file)
        except OSError:
            return None
        self._replaced[file] = mark
        return LogPiece(self._name(file), data)


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


NODES = "nodes"  # the folder of the actors' own logs
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}"
_LOG = re.compile(rf"replicas/\d{{1,9}}/{_NAME}\.(jsonl|log)|(spares|{NODES})/{_NAME}\.log")
_REPLACED = re.compile(rf"replicas/\d{{1,9}}/{re.escape(REPLACED)}")


class LogReceiver:
    """Appends to the logs in the run directory; no other process writes them. A full disk loses lines."""

    def __init__(self, folder: Path, lost: Callable[[Lost], None] = lambda _: None) -> None:
        """Write to a run directory.

        Args:
            lost: Called with the lost lines of a log when that log can be written again.
        """
        self._folder = folder
        self._tell = lost
        self._lost: dict[str, Lost] = {}
        self._again: dict[str, LogPiece] = {}  # new contents of files that could not be written yet

    def add(self, pieces: Iterable[LogPiece]) -> None:
        """Add what ranks wrote.

        Raises:
            ValueError: A name is not that of a log. Actors must not write other files here.
        """
        again, self._again = self._again, {}
        for piece in (*again.values(), *pieces):
            replaced = _REPLACED.fullmatch(piece.name) is not None
            if not replaced and not _LOG.fullmatch(piece.name):
                raise ValueError(f"{piece.name!r} is no log of a rank")
            file = self._folder / piece.name
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                if replaced:
                    part = file.with_name(f".{REPLACED}.part")
                    part.write_bytes(piece.data)
                    part.replace(file)
                else:
                    _append(file, piece.data)
            except OSError as error:
                if replaced:
                    self._again[piece.name] = piece
                    continue
                now, lines = time.time(), max(1, piece.data.count(b"\n"))
                before = self._lost.get(piece.name, Lost(piece.name, 0, now, now, ""))
                self._lost[piece.name] = replace(before, lines=before.lines + lines, why=str(error.strerror))
            else:
                if (lost := self._lost.pop(piece.name, None)) is not None:
                    self._tell(replace(lost, until=time.time()))


def _append(file: Path, data: bytes) -> None:
    """Add complete lines to a log, all or none. Raises OSError."""
    clear_way(file)
    with file.open("ab", buffering=0) as log:
        size = log.seek(0, os.SEEK_END)
        if log.write(data) != len(data):
            log.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
