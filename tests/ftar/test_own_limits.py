"""A rank that has run out of descriptors, ports or memory names itself and ends; no neighbour is blamed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any
from unittest import mock

import httpx
import pytest

from ft_hsdp import address, handshake
from ft_hsdp.errors import EXIT_RETRYABLE, LocalResourceError, exhausted
from ft_hsdp.ftar.rendezvous import Rendezvous
from tests.support.ftar.ring_helpers import Ring, grant, until


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL])
def test_what_is_used_up_is_named_with_its_limit(number: int) -> None:
    error = exhausted(OSError(number, os.strerror(number)))
    assert error is not None
    assert error.exit_code == EXIT_RETRYABLE
    assert errno.errorcode[number] in str(error)
    assert "RLIMIT" in str(error) or "/proc/sys" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "number", [errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT, errno.EAGAIN, errno.EPIPE]
)
def test_what_a_neighbour_may_have_caused_is_not_local(number: int) -> None:
    assert exhausted(OSError(number, os.strerror(number))) is None


def test_a_local_error_is_found_behind_what_was_raised_from_it() -> None:
    raised = httpx.ConnectError("All connection attempts failed")
    raised.__cause__ = ExceptionGroup("all", [OSError(errno.EMFILE, "none left")])
    assert exhausted(raised) is not None
    assert exhausted(RuntimeError("can't start new thread")) is not None
    assert exhausted(MemoryError()) is not None
    assert exhausted(RuntimeError("something else")) is None


@pytest.mark.parametrize("side", ["_call", "_admit"])
async def test_a_member_without_descriptors_names_itself(side: str) -> None:
    """It may be the one that calls or the one that is called; the others hear whose fault it is."""
    usual = getattr(Rendezvous, side)
    ended: list[Exception] = []

    async def fail(rendezvous: Rendezvous, *arguments: Any) -> None:
        if rendezvous.position == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        await usual(rendezvous, *arguments)

    with mock.patch.object(Rendezvous, side, fail):
        async with Ring(0, 1, 2) as ring:
            ring.peers[1].group.crashed = lambda message, error: ended.append(error)  # type: ignore[method-assign]
            for peer in ring.peers:
                peer.group.configure(grant(1, ring.addresses))
            await until(lambda: all(p.broken for p in ring.peers), "all know")
            assert [p.broken[0].suspect for p in ring.peers] == [1, 1, 1]
            assert all("RLIMIT_NOFILE" in p.broken[0].cause for p in ring.peers)
    assert ended
    assert all(isinstance(error, LocalResourceError) for error in ended)


async def test_a_member_that_cannot_accept_ends_after_some_tries() -> None:
    """And only then: a descriptor that becomes free in time is used."""
    ended: list[Exception] = []
    failures = [handshake.ACCEPT_TRIES - 1]
    usual = socket.socket.accept

    def accept(listener: socket.socket) -> Any:
        if failures[0] > 0 and listener.family == socket.AF_INET:
            failures[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return usual(listener)

    with mock.patch.object(socket.socket, "accept", accept), mock.patch.object(handshake, "PAUSE_S", 0.001):
        async with Ring(0) as ring:
            ring.peers[0].group.crashed = lambda message, error: ended.append(error)  # type: ignore[method-assign]
            where = address.split(ring.peers[0].address)
            for first in (True, False):
                with socket.create_connection(where) as sock:
                    sock.setblocking(False)
                    if first:
                        assert await asyncio.get_running_loop().sock_recv(sock, 4) == handshake.MAGIC
                        assert not failures[0]
                        assert not ended
                        failures[0] = handshake.ACCEPT_TRIES + 2  # one costs the stranger its place
                    else:
                        await until(lambda: ended, "it ends")
    (error,) = ended
    assert isinstance(error, LocalResourceError)
