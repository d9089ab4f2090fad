"""The bench's end of a worker."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_hsdp.errors import Retryable
from ft_hsdp.launch.backend.processes import last_line

ANSWER_S = 120.0  # longest time for one answer
GONE_S = 10.0  # longest time for a killed process to go

Answer = dict[str, Any]


class Link:
    """Socket and life of one worker. `name` says which one it is, as a user would."""

    def __init__(self, name: str, sock: socket.socket, log: Path, pidfd: int | None = None) -> None:
        self.name = name
        self.address = ""
        self.pid = 0
        self._sock = sock
        self._log = log
        self._pidfd = pidfd
        self._pending = b""

    def greet(self, answer: Answer) -> None:
        """Take the worker's first words."""
        self.address, self.pid = answer["address"], answer["pid"]
        if self._pidfd is None:
            self._pidfd = os.pidfd_open(self.pid)  # it waits for us, so it is still that process

    def send(self, command: Mapping[str, Any]) -> None:
        """Give it something to do. Raises Retryable if it is gone."""
        try:
            self._sock.sendall(json.dumps(command).encode() + b"\n")
        except ConnectionError:
            raise self._gone() from None

    def kill(self) -> float:
        """SIGKILL it; the moment before. No other process can be hit."""
        assert self._pidfd is not None
        moment = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return moment

    def close(self) -> None:
        """Kill it, wait until it is gone."""
        if self._pidfd is not None:
            self.kill()
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll(GONE_S * 1e3)
            os.close(self._pidfd)
            self._pidfd = None
        self._sock.close()

    def fileno(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    def read(self) -> Answer | None:
        """Take what has arrived; an answer, once it is whole. Raises Retryable if the worker failed or is gone."""
        try:
            data = self._sock.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            raise self._gone()
        self._pending += data
        if not self._pending.endswith(b"\n"):
            return None
        answer: Answer = json.loads(self._pending)
        self._pending = b""
        if "error" in answer:
            raise Retryable(f"bench: {self.name} failed: {answer['error']}")
        return answer

    def _gone(self) -> Retryable:
        line = last_line(self._log)
        return Retryable(f"bench: {self.name} died" + (f": {line}" if line else ""))


def collect(links: Sequence[Link], timeout_s: float = ANSWER_S) -> list[Answer]:
    """One answer of each, in their order. Raises Retryable as soon as one of them fails, and at the deadline."""
    deadline = time.monotonic() + timeout_s
    answers: dict[Link, Answer] = {}
    with selectors.DefaultSelector() as waiting:  # select knows descriptors below 1024 only
        for each in links:
            waiting.register(each, selectors.EVENT_READ, each)
        while waiting.get_map():
            readable = waiting.select(max(0.0, deadline - time.monotonic()))
            if not readable:
                late = next(link for link in links if link not in answers)
                raise Retryable(f"bench: {late.name} did not answer within {timeout_s:g} s")
            for key, _ in readable:
                link: Link = key.data
                if (answer := link.read()) is not None:
                    answers[link] = answer
                    waiting.unregister(link)
    return [answers[link] for link in links]


def ask(links: Iterable[Link], command: Mapping[str, Any], timeout_s: float = ANSWER_S) -> list[Answer]:
    """Have all do one thing; their answers."""
    asked = list(links)
    for link in asked:
        link.send(command)
    return collect(asked, timeout_s)
