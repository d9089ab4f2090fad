"""Inbox: the run directory on the driver's node, to which is added what the outboxes of the job's actors hold."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ft_hsdp.events import Lost
from ft_hsdp.launch.ray.outbox import REPLACED, Piece

NODES = "nodes"  # the folder of the actors' own logs
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}"
_LOG = re.compile(rf"replicas/\d{{1,9}}/{_NAME}\.(jsonl|log)|(spares|{NODES})/{_NAME}\.log")
_REPLACED = re.compile(rf"replicas/\d{{1,9}}/{re.escape(REPLACED)}")


class Inbox:
    """The folder of the run; nobody else writes these files. A disk that does not take lines costs those lines.

    lost: is told of them, with the name of the log in the folder, once that log takes lines again.
    """

    def __init__(self, folder: Path, lost: Callable[[Lost], None] = lambda _: None) -> None:
        self._folder = folder
        self._tell = lost
        self._lost: dict[str, Lost] = {}
        self._again: dict[str, Piece] = {}  # what replaces a file, and found no place yet

    def add(self, pieces: Iterable[Piece]) -> None:
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
