"""Inbox: the run directory on the driver's node, to which is added what the outboxes of the job's actors hold."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ft_hsdp.launch.ray.outbox import REPLACED, Piece

NODES = "nodes"  # the folder of the actors' own logs
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}"
_LOG = re.compile(rf"replicas/\d{{1,9}}/{_NAME}\.(jsonl|log)|(spares|{NODES})/{_NAME}\.log")
_REPLACED = re.compile(rf"replicas/\d{{1,9}}/{re.escape(REPLACED)}")


class Inbox:
    """The folder of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add what ranks wrote. Raises ValueError for a name that is no log's: nothing else is written here."""
        for piece in pieces:
            replaced = _REPLACED.fullmatch(piece.name) is not None
            if not replaced and not _LOG.fullmatch(piece.name):
                raise ValueError(f"{piece.name!r} is no log of a rank")
            file = self._folder / piece.name
            file.parent.mkdir(parents=True, exist_ok=True)
            if replaced:
                part = file.with_name(f".{REPLACED}.part")
                part.write_bytes(piece.data)
                part.replace(file)
            else:
                with file.open("ab") as log:
                    log.write(piece.data)
