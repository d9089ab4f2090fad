"""The worker's end: a process that does what the bench says over a socket, in JSON lines.

<- {"address": "", "pid": 1}          once, when it is set up
-> {...}        <- {...}              for each command
<- {"error": "one line"}              when something fails; then the worker ends
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ft_hsdp.errors import EXIT_OK, EXIT_RETRYABLE

Answer = Mapping[str, Any]
Obey = Callable[[Mapping[str, Any]], Answer]
"""Carries out a command, and returns the answer."""

SetUp = Callable[[], tuple[Answer, Obey]]
"""Prepares a worker; returns what it says when it is set up, and what carries out its commands."""


def serve(sock: socket.socket, set_up: SetUp) -> int:
    """Set up, then obey until the bench closes its end; return the exit code."""
    with sock, sock.makefile("rw", encoding="utf-8") as stream:

        def say(answer: Answer) -> None:
            stream.write(json.dumps(answer) + "\n")
            stream.flush()

        try:
            greeting, obey = set_up()
            say({"address": "", "pid": os.getpid(), **greeting})
            for line in stream:
                say(obey(json.loads(line)))
        except Exception as error:  # of any kind: the bench gets it as one line, the log as a traceback
            traceback.print_exc()
            with contextlib.suppress(OSError):
                say({"error": " ".join(f"{type(error).__name__}: {error}".split())})
            return EXIT_RETRYABLE
    return EXIT_OK


def run_worker(set_up: SetUp) -> NoReturn:
    """Serve over the socket whose number is the first argument, and exit without waiting for other threads."""
    code = serve(socket.socket(fileno=int(sys.argv[1])), set_up)
    sys.stderr.flush()
    os._exit(code)
