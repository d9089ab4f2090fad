"""Alerts: tells people what needs them (`overview.alarms`), by a webhook or a program of theirs.

Each target has a thread and a queue, so a webhook that hangs delays neither a step nor a request, a row of the
journal or another target. What is not delivered is tried again, in order. Messages live in memory: those of a
lighthouse that dies are lost, and the next one tells what still holds.

A webhook's URL is a secret, and so may arguments of a program be: logs name the host or the program alone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from ft_hsdp.config import AlertConfig
from lighthouse.overview.alarms import Alarm, Alarms, Facts
from lighthouse.overview.overview import Overview

KEPT = 200  # newest messages that wait for one target
RETRY_S, LONGEST_S = 2.0, 60.0  # between two attempts; doubled from the first to the second
SAY_S = 60.0  # between two log lines about one target
ANSWER_S = 10.0  # longest wait for a webhook
RUN_S = 30.0  # longest run of a program
CLOSE_S = 2.0  # longest time for the last messages
AGAIN = (408, 429)  # answers of 4xx after which another attempt may succeed
OWN = "FT_HSDP_"  # variables with secrets of the job, which a program does not get
SHOWN = str.maketrans("<>", "()")  # Slack takes <!channel> for an order; texts may be a worker's

_log = logging.getLogger(__name__)
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs whole URLs, and that of a webhook is a secret


class NotDelivered(Exception):
    """A target did not take a message; the text says why, without a secret."""


class GivenUp(NotDelivered):
    """It will not take this message, however often it is sent."""


class AlertSink:
    """Tells each target of the alarms of its rules. It belongs to the event loop of its journal."""

    def __init__(
        self,
        alerts: Sequence[AlertConfig],
        job: str,
        page: str,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a thread for each target.

        Args:
            page: URL of the job's page, without a key.
        """
        self._head, self._page = job, page
        self._clock, self._monotonic = clock, monotonic
        self._alarms = Alarms(monotonic())
        self._targets = [(alert.rules, _target(alert)) for alert in alerts]

    def take(self, kind: str, seq: int, row: Mapping[str, Any]) -> None:
        self._tell(self._alarms.take(kind, row, self._monotonic()))

    def look(self, overview: Overview, paused: bool) -> None:
        """Take what the overview shows now."""
        self._tell(self._alarms.look(Facts.of(overview, paused, self._clock()), self._monotonic()))

    def close(self) -> None:
        """Deliver what waits if it can be delivered now, and end the threads; blocks for at most `CLOSE_S`."""
        for _, target in self._targets:
            target.end()
        until = time.monotonic() + CLOSE_S
        for _, target in self._targets:
            target.join(max(0.0, until - time.monotonic()))

    def _tell(self, alarms: Iterable[Alarm]) -> None:
        for alarm in alarms:
            text = alarm.text if alarm.raised else f"resolved: {alarm.rule} of {alarm.subject}: {alarm.text}"
            message = {
                "text": f"{self._head}: {text}".translate(SHOWN),  # the one key that Slack needs
                "job": self._head,
                "rule": alarm.rule,
                "subject": alarm.subject,
                "state": "raised" if alarm.raised else "resolved",
                "t": alarm.t,
                "page": self._page,
            }
            for rules, target in self._targets:
                if alarm.rule in rules:
                    target.put(json.dumps(message).encode())


class Target:
    """Delivers messages to one receiver, in order, on a thread of its own."""

    def __init__(self, name: str, deliver: Callable[[bytes], None], retry_s: float = RETRY_S) -> None:
        """Start the thread.

        Args:
            name: of the receiver in logs.
            deliver: delivers one message, and blocks meanwhile; raises whatever it likes if it cannot.
            retry_s: from the first failed attempt to the next.
        """
        self._name, self._deliver, self._retry_s = name, deliver, retry_s
        self._waiting: deque[bytes] = deque(maxlen=KEPT)
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._said = -SAY_S
        self._thread = threading.Thread(target=self._run, name=f"alerts to {name}", daemon=True)
        self._thread.start()

    def put(self, message: bytes) -> None:
        with self._changed:
            self._waiting.append(message)
            self._changed.notify()

    def end(self) -> None:
        """Have waiting messages tried until one fails, and then the thread end. Does not wait."""
        self._ending.set()
        with self._changed:
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._waiting:
            _log.warning("alerts: %d messages to %s are not delivered", len(self._waiting), self._name)

    def _run(self) -> None:
        wait_s = self._retry_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending.is_set())
                if not self._waiting:
                    return
                message = self._waiting[0]
            try:
                self._deliver(message)
            except GivenUp as error:
                _log.warning("alerts: %s refuses a message: %s", self._name, error)
            except Exception as error:  # a library may raise anything, and its text may hold the URL
                self._complain(str(error) if isinstance(error, NotDelivered) else type(error).__name__)
                if self._ending.wait(wait_s):
                    return
                wait_s = min(2 * wait_s, LONGEST_S)
                continue
            wait_s = self._retry_s
            with self._changed:
                if self._waiting and self._waiting[0] is message:  # else newer ones took its place
                    self._waiting.popleft()

    def _complain(self, why: str) -> None:
        if time.monotonic() - self._said >= SAY_S:
            self._said = time.monotonic()
            _log.warning("alerts: %d messages wait for %s: %s", len(self._waiting), self._name, why)


def _target(alert: AlertConfig) -> Target:
    if alert.url is not None:
        return Target(str(urlsplit(alert.url).hostname), partial(post, alert.url, ssl.create_default_context()))
    return Target(Path(alert.command[0]).name, partial(run_program, alert.command))


def post(url: str, trusted: ssl.SSLContext, message: bytes, answer_s: float = ANSWER_S) -> None:
    """Post a message as JSON. A redirect is not followed, and no body is read. Raises NotDelivered, or httpx's."""
    options: dict[str, Any] = {"content": message, "headers": {"Content-Type": "application/json"}}
    with (
        httpx.Client(verify=trusted, timeout=answer_s, follow_redirects=False) as client,
        client.stream("POST", url, **options) as response,
    ):
        code = response.status_code
    if 400 <= code < 500 and code not in AGAIN:
        raise GivenUp(f"status {code}")
    if not 200 <= code < 300:
        raise NotDelivered(f"status {code}")


def run_program(command: Sequence[str], message: bytes, run_s: float = RUN_S) -> None:
    """Run a program with a message on its standard input. Raises NotDelivered, or OSError."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=env, **quiet) as program:
        try:
            program.communicate(message, run_s)
        except subprocess.TimeoutExpired:
            raise NotDelivered(f"it runs for more than {run_s:g} s, and is killed") from None
        finally:
            if program.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
    if program.returncode:
        raise NotDelivered(f"it ends with {program.returncode}")
