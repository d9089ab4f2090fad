"""Communicator: FTAR for callers without a control loop of their own: blocking, from any thread.

Whoever uses it brings a membership: an epoch that only rises, and the ordered addresses of the members. The
trainer does not use it; it drives a `Group` from its own control loop, with grants as memberships.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from torch import Tensor

from ft_hsdp import protocol
from ft_hsdp.address import split
from ft_hsdp.core import state_id
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConnectFailed, FTARError, InvalidArgument, RemoteAbort, StaleEpoch
from ft_hsdp.ftar.allreduce import DTYPES
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.lifecycle import GroupState
from ft_hsdp.ftar.listener import MemberIdentity
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.protocol import RingAbort

_NOTHING = "0" * 32
_BASE = StateId(0, 0, _NOTHING)


class Communicator:
    """One member of rings of changing membership. Made once; `reconfigure` forms each ring (FT-HSDP §4.2).

    ``job``, ``rank``, ``layout`` and the sizes in ``settings`` must be the same in all members of a ring;
    ``token`` is the secret that they share.
    """

    def __init__(
        self,
        member: int,
        *,
        token: str,
        job: str = "job",
        rank: int = 0,
        host: str = "127.0.0.1",
        settings: Settings | None = None,
        layout: str = "",
    ) -> None:
        self._member = member
        self._settings = settings or Settings()
        sizes = (self._settings.chunk_bytes, self._settings.slots, self._settings.connections)
        identity = MemberIdentity(member, 0, state_id.digest(job, rank, layout, sizes), token)
        self._token = token
        self._count = 0
        self._formed: concurrent.futures.Future[None] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._crash)
        self._thread = threading.Thread(target=self._loop.run_forever, name="ftar-control", daemon=True)
        self._thread.start()
        events = GroupEvents(self._connected, self._broken, lambda grant: None, lambda token: None)
        self._group = Group(identity, self._settings, events)
        try:
            self.address: str = self._call(self._listen(host))
        except BaseException:
            self.close()
            raise

    async def _listen(self, host: str) -> str:
        return self._group.listen(host)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    # What the group says, on the loop.

    def _connected(self, epoch: int) -> None:
        if self._formed is not None and not self._formed.done():
            self._formed.set_result(None)

    def _broken(self, abort: RingAbort) -> None:
        if self._formed is not None and not self._formed.done():
            self._formed.set_exception(self._group.error or RemoteAbort(abort.cause, suspect=abort.suspect))

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What fails on the loop is a failure of the ring: nobody may wait for it."""
        error = context.get("exception")
        cause = error if isinstance(error, FTARError) else FTARError(f"{context.get('message')}: {error}")
        self._group.abort(cause)

    # The caller.

    @property
    def state(self) -> GroupState:
        """Where the group is."""
        return self._group.state

    @property
    def epoch(self) -> int:
        """The largest epoch that was claimed."""
        return self._group.epoch

    @property
    def transports(self) -> tuple[str, ...]:
        """What the edges to the right and to the left use."""
        return self._group.transports

    def high_water(self) -> int:
        """Most bytes that were ever on their way to the right neighbour in this epoch."""
        return self._group.high_water

    def reconfigure(self, epoch: int, members: Sequence[tuple[int, str]], timeout_s: float | None = None) -> None:
        """Form the ring of ``epoch`` from ordered (member, "host:port"), this one among them; wait for it.

        The epoch is claimed first: whatever happens then, only a larger one will do.

        Raises:
            InvalidArgument: this member is not among them, one stands there twice, or an address is none.
            StaleEpoch: the epoch was claimed before.
            ConnectFailed: the ring did not form in time; its suspect is whom we waited for.
            RemoteAbort: another member gave it up.
        """
        names = [m for m, _ in members]
        if names.count(self._member) != 1 or len(set(names)) != len(names):
            raise InvalidArgument(f"members {names}: each once, and member {self._member} among them")
        if not epoch < 2**32:
            raise InvalidArgument(f"epoch: got {epoch}; allowed: less than 2**32")
        for _, where in members:
            try:
                _, port = split(where)
            except ValueError:
                port = 0
            if not port:
                raise InvalidArgument(f"address: got {where!r}; allowed: host:port, [host]:port for IPv6")
        entries = tuple(Member(m, "", "contribute", (address,), ("",)) for m, address in members)
        plain = Grant(0, epoch, _BASE, entries, len(entries), "")
        with self._lock:
            self._check_open()
            self._call(self._configure(protocol.sign(self._token, plain)))
            formed = self._formed
        assert formed is not None
        try:
            formed.result(timeout_s)
        except TimeoutError:
            self.abort(f"epoch {epoch} was not formed within {timeout_s} s")
            raise ConnectFailed(f"epoch {epoch} was not formed within {timeout_s} s") from None

    async def _configure(self, grant: Grant) -> None:
        if self._group.state is GroupState.FATAL:
            raise StaleEpoch("the communicator is FATAL")
        if grant.epoch <= self._group.epoch:
            raise StaleEpoch(f"epoch {grant.epoch}: {self._group.epoch} was claimed before")
        if self._formed is not None and not self._formed.done():
            self._formed.set_exception(StaleEpoch(f"epoch {grant.epoch} came before it was formed"))
        self._formed = concurrent.futures.Future()
        self._count = 0
        self._group.configure(grant)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A registered tensor: a neighbour on the same host reads it in place, without a copy."""
        return self._group.arena.empty(shape, dtype)

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        out: Tensor | None = None,
        contribute: bool = True,
        preserve_input: bool = True,
    ) -> Work:
        """Sum ``tensor`` (contiguous, on the CPU, of any shape) over the ring into ``out``; several may be queued.

        Without ``out`` the sum goes to a new registered tensor or, without ``preserve_input``, into ``tensor``
        itself, whose content is then lost if the work fails. Not ``contribute``: what it holds is never read.

        Raises:
            InvalidArgument: a tensor that cannot be summed like this.
            StaleEpoch: the communicator is closed.
        """
        target = out if out is not None else (self.empty(tensor.shape, tensor.dtype) if preserve_input else tensor)
        _check(tensor, target)
        with self._lock:
            self._check_open()
            step, self._count = self._count, self._count + 1
            key = Key(self._group.epoch, step % 2**32, 0, 0, _NOTHING)
            mine = Entry(self._member % 2**16, int(contribute), 0, 0, 0.0)
            flat = target.detach().view(-1)
            local = flat if tensor.data_ptr() == flat.data_ptr() else tensor.detach().view(-1)
            return self._group.all_reduce(key, local if contribute else None, flat, mine)

    def abort(self, reason: str = "aborted") -> None:
        """Give the ring up and tell all its members."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._group.abort, RemoteAbort(reason))

    def close(self) -> None:
        """Leave the ring, end the threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._call(self._group.close())
            if self._formed is not None and not self._formed.done():
                self._formed.set_exception(StaleEpoch("the communicator was closed"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StaleEpoch("the communicator is CLOSED")


def _check(tensor: Tensor, out: Tensor) -> None:
    if tensor.shape != out.shape or tensor.dtype != out.dtype:
        raise InvalidArgument(
            f"out is {out.dtype} {tuple(out.shape)}, tensor {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.dtype not in DTYPES:
        raise InvalidArgument(f"dtype: got {tensor.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    for name, t in (("tensor", tensor), ("out", out)):
        if not t.is_contiguous() or t.device.type != "cpu":
            raise InvalidArgument(f"{name}: got {t.device}, strides {t.stride()}; allowed: contiguous, on the CPU")
