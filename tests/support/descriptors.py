"""Descriptors of a process: high ones, which select.select cannot take, and those that libuv keeps."""

import fcntl
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

LOWEST = 1100


def warm_libuv() -> None:
    """Have the pipe and the threads that libuv keeps for all loops of a process."""
    loop = uvloop.new_event_loop()
    loop.run_until_complete(loop.getaddrinfo("localhost", 80))
    loop.close()


@contextmanager
def raised(sock: socket.socket) -> Iterator[socket.socket]:
    """The same connection under a descriptor above 1023; the one that is given stays open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * LOWEST)), hard))
    try:
        with socket.socket(fileno=fcntl.fcntl(sock, fcntl.F_DUPFD_CLOEXEC, LOWEST)) as high:
            yield high
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
