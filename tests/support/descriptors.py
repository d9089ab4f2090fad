"""Sockets with descriptors that select.select cannot take, as a process with many open files has them."""

import fcntl
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

LOWEST = 1100


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
