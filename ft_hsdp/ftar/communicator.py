"""The public API of FTAR for callers that have no control loop of their own (FT-HSDP §4.2).

The caller decides about membership: it chooses an epoch that only grows, and the ordered addresses of the members.
The trainer does not use this module; it drives a `Group` from its own control loop, with grants of the lighthouse
as memberships.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
import uvloop
from torch import Tensor

from ft_hsdp import protocol
from ft_hsdp.address import split
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import Contribution
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConnectFailed, FTARError, InvalidArgument, RemoteAbort, StaleEpoch
from ft_hsdp.ftar.allreduce import DTYPES
from ft_hsdp.ftar.connections import MemberIdentity
from ft_hsdp.ftar.executor import Work
from ft_hsdp.ftar.frame import Entry, Key
from ft_hsdp.ftar.group import Group, GroupEvents
from ft_hsdp.ftar.lane import GroupState
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.protocol import RingAbort

_NOTHING = "0" * 32
_BASE = StateId(0, 0, _NOTHING)


class Communicator:
    """One member of the rings of successive epochs. Make it once; `reconfigure` forms each ring (FT-HSDP §4.2).

    All methods may be called from any thread. Two daemon threads work for the communicator until `close`:
    `ftar-control` runs the control loop, `ftar` runs the all-reduces.

    Args:
        member: number of this member, at least 0 and different for each member of a ring.
        token: secret that all members share; connections without it are refused.
        job: name of the job; must be the same in all members of a ring.
        rank: number of this ring among the rings of the job; must be the same in all members.
        host: address of this machine that the other members can reach. The port is chosen freely.
        settings: sizes, deadlines and transports. The sizes must be the same in all members.
        layout: description of what is summed; must be the same in all members.

    Raises:
        OSError: `host` is not an address of this machine, or no port or descriptor is left.

    Attributes:
        address: "host:port" at which the other members reach this one.
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
        self._loop = uvloop.new_event_loop()
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

    # Callbacks of the group, on the control loop.

    def _connected(self, epoch: int) -> None:
        if self._formed is not None and not self._formed.done():
            self._formed.set_result(None)

    def _broken(self, abort: RingAbort) -> None:
        if self._formed is not None and not self._formed.done():
            self._formed.set_exception(self._group.error or RemoteAbort(abort.cause, suspect=abort.suspect))

    def _crash(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the ring when a callback on the loop fails, so that no caller waits for it forever."""
        error = context.get("exception")
        cause = error if isinstance(error, FTARError) else FTARError(f"{context.get('message')}: {error}")
        self._group.abort(cause)

    # Methods for the caller, on any thread.

    @property
    def state(self) -> GroupState:
        """The current state of the group."""
        return self._group.state

    @property
    def epoch(self) -> int:
        """The largest epoch that `reconfigure` has claimed; 0 before the first call."""
        return self._group.epoch

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports of the edges to the right and to the left neighbour, such as ("shm", "tcp")."""
        return self._group.transports

    def high_water(self) -> int:
        """Return the largest number of bytes that were in flight to the right neighbour at once in this epoch."""
        return self._group.high_water

    def reconfigure(self, epoch: int, members: Sequence[tuple[int, str]], timeout_s: float | None = None) -> None:
        """Form the ring of `epoch`; block until all members are connected.

        The epoch is claimed first. If the ring does not form, only a call with a larger epoch can form one. Edges
        between two members that stay neighbours are kept.

        Args:
            epoch: number of the ring, larger than all before and less than 2**32.
            members: (member, "host:port") of all members in ring order, this one among them. All members must pass
                the same list.
            timeout_s: how long to wait. None: the deadlines in the settings alone end the wait.

        Raises:
            InvalidArgument: this member is missing, a member is listed twice, an address is malformed, or the
                epoch is too large.
            StaleEpoch: the epoch is not larger than the last one, a later call replaced it, or the communicator is
                closed.
            ConnectFailed: the ring did not form in time; `suspect` is the member that did not answer, if that is
                known.
            RemoteAbort: another member gave the ring up.
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
        """Return an uninitialized registered CPU tensor.

        A neighbour on the same host reads registered memory in place; other tensors are copied.

        Args:
            shape: number of elements, or the sizes of all dimensions.
            dtype: type of the elements.

        Raises:
            OSError: no memory or descriptor is left.
        """
        return self._group.arena.empty(shape, dtype)

    def all_reduce(
        self,
        tensor: Tensor,
        *,
        out: Tensor | None = None,
        contribute: bool = True,
        preserve_input: bool = True,
    ) -> Work:
        """Queue the sum of `tensor` over all members of the current ring. Return at once.

        All members must queue all-reduces of the same size and type in the same order. The sum has the same bits
        in all members.

        Args:
            tensor: contiguous CPU tensor of any shape; float32, bfloat16, float16, float64, int32 or int64. It is
                only read, and must not change before the work is done.
            out: contiguous CPU tensor of the same shape and type that receives the sum; may be `tensor`. None: see
                `preserve_input`.
            contribute: False adds nothing of this member: the values of `tensor` are never read, and only its
                shape and type count.
            preserve_input: without `out`, True puts the sum into a new registered tensor. False puts it into
                `tensor`, whose values are lost if the work fails.

        Returns:
            A future of the result; `wait` returns the sum. If it fails with a RecoverableError, queue the tensor
            again in a later epoch.

        Raises:
            InvalidArgument: the shapes, types, devices or layouts of the tensors are not allowed.
            StaleEpoch: the communicator is closed.
            OSError: no memory is left for the new tensor.
        """
        target = out if out is not None else (self.empty(tensor.shape, tensor.dtype) if preserve_input else tensor)
        _check(tensor, target)
        with self._lock:
            self._check_open()
            step, self._count = self._count, self._count + 1
            key = Key(self._group.epoch, step % 2**32, 0, 0, _NOTHING)
            number = self._member % 2**16
            mine = Entry(number, (Contribution(number, 1, 0, 0),) if contribute else ())
            flat = target.detach().view(-1)
            local = flat if tensor.data_ptr() == flat.data_ptr() else tensor.detach().view(-1)
            return self._group.all_reduce(key, local if contribute else None, flat, mine)

    def abort(self, reason: str = "aborted") -> None:
        """Break the current ring and tell all its members `reason`. Return at once.

        Pending works fail with RemoteAbort here and in the other members. Only a larger epoch forms a ring again.
        """
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._group.abort, RemoteAbort(reason))

    def close(self) -> None:
        """Leave the ring and end both threads; block until they have ended. Pending works fail with StaleEpoch."""
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
