"""The files that ranks write on their nodes, taken to the run's directory of the driver.

`LogSender` runs in each actor: it keeps what its node's files have gained until the driver has taken it.
`LogReceiver` runs in the driver, and appends what it takes to the files of the same names.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ft_hsdp.jsonl import Lost

LIMIT = 1 << 20  # bytes that are held at once
REPLACED = "final.json"


@dataclass(frozen=True, slots=True)
class LogPiece:
    """What is added to a file, or the new content of one that is replaced as a whole.

    name: its path in the run directory, with slashes.
    """

    name: str
    data: bytes


class LogSender:
    """The logs of replicas and spares in the folder `run`. A line that is not whole yet waits.

    others: file -> the name under which it is sent.
    """

    def __init__(self, run: Path, others: Mapping[Path, str]) -> None:
        self._run = run
        self._others = others
        self._sent: dict[Path, int] = {}  # how much of each log
        self._replaced: dict[Path, tuple[int, int]] = {}  # what each REPLACED looked like when it was sent

    def take(self, *, flush: bool) -> tuple[list[LogPiece], bool]:
        """Return what is new, and whether that is all. flush: the writers have ended, so take parts of lines."""
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

    def _final(self, file: Path) -> LogPiece | None:
        try:
            info = file.stat()
            mark = (info.st_ino, info.st_mtime_ns)
            if mark == self._replaced.get(file):
                return None
            data = file.read_bytes()
        except OSError:
            return None
        self._replaced[file] = mark
        return LogPiece(self._name(file), data)


def _names(folder: Path) -> list[str]:
    """What is in a folder, sorted; nothing where there is none."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


NODES = "nodes"  # the folder of the actors' own logs
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}"
_LOG = re.compile(rf"replicas/\d{{1,9}}/{_NAME}\.(jsonl|log)|(spares|{NODES})/{_NAME}\.log")
_REPLACED = re.compile(rf"replicas/\d{{1,9}}/{re.escape(REPLACED)}")


class LogReceiver:
    """The run's folder; no other process writes these files. A disk that does not take lines costs those lines.

    lost: is told of them, with the name of the log in the folder, once that log takes lines again.
    """

    def __init__(self, folder: Path, lost: Callable[[Lost], None] = lambda _: None) -> None:
        self._folder = folder
        self._tell = lost
        self._lost: dict[str, Lost] = {}
        self._again: dict[str, LogPiece] = {}  # what replaces a file, and found no place yet

    def add(self, pieces: Iterable[LogPiece]) -> None:
        """Add what ranks wrote. Raises ValueError for a name that is no log's: nothing else is written here."""
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
    """Add whole lines to a log, all or none. Raises OSError."""
    with file.open("ab", buffering=0) as log:
        size = log.seek(0, os.SEEK_END)
        if log.write(data) != len(data):
            log.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
