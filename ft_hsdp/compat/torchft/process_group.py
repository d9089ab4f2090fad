"""A process group for torchft that sums through FTAR and does everything else through gloo.

A control plane names the ranks of a quorum in one of two ways: torchft 0.2 by a prefix in a store that it serves
(`ProcessGroupFTAR.configure`), c10d and torchft's nightly by handles of the groups
(`ProcessGroupFTAR.reconfigure`). Both end in `ProcessGroupFTAR._join`.

`TorchftMember` is this process's communicator. It is kept through all quorums, with its buffers and connections,
so a new quorum connects only to neighbours that changed.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistNetworkError, ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions, BarrierOptions
from torchft.process_group import ProcessGroup, create_store_client

from ft_hsdp import address
from ft_hsdp.compat.torchft import handles
from ft_hsdp.compat.torchft.handles import ReconfigureOptions
from ft_hsdp.compat.torchft.quorum import (
    SLICE_S,
    Patience,
    Quorum,
    RingAddresses,
    TorchftRendezvous,
    connect_gloo,
    first_line,
    translated,
)
from ft_hsdp.compat.torchft.work import DoneWork
from ft_hsdp.errors import FTARError, InvalidArgument
from ft_hsdp.ftar import Communicator, Settings
from ft_hsdp.ftar.allreduce import DTYPES
from ft_hsdp.ftar.lane import GroupState


class TorchftMember:
    """This process as a member of rings, and its communicator.

    torchft's ranks change with every quorum, so the ring knows its members by a number instead.
    """

    def __init__(self, settings: Settings) -> None:
        self.number = secrets.randbits(48)  # no other process has it
        self.token = secrets.token_hex(16)  # the secret that the ranks of a ring share
        self.epoch = 0  # of the last ring that was agreed on
        self._settings = settings
        self._communicator: Communicator | None = None

    @property
    def communicator(self) -> Communicator:
        """The communicator that the last `admit` made."""
        assert self._communicator is not None, "process group not initialized"
        return self._communicator

    def admit(self, token: str, host: str, timeout_s: float) -> tuple[int, str]:
        """Make a communicator for the shared secret ``token``, or keep the one that fits.

        Args:
            token: The secret that the ranks of the ring agreed on.
            host: The address at which the others call.
            timeout_s: How long a neighbour may be silent within a sum.

        Returns:
            The member's number, and the "host:port" at which the others call.
        """
        settings = dataclasses.replace(
            self._settings,
            timeout_s=timeout_s,
            connect_timeout_s=min(timeout_s, self._settings.connect_timeout_s),
        )
        old = self._communicator
        useless = old is not None and old.state in (GroupState.FATAL, GroupState.CLOSED)
        if useless or token != self.token or settings != self._settings:
            self.close()
        self.token, self._settings = token, settings
        if self._communicator is None:
            self._communicator = Communicator(self.number, token=token, host=host, settings=settings)
        return self.number, self._communicator.address

    def broken(self) -> bool:
        return self.communicator.state not in (GroupState.READY, GroupState.RUNNING)

    def abort(self, reason: str) -> None:
        if self._communicator is not None:
            self._communicator.abort(reason)

    def close(self) -> None:
        """Leave the ring and end the threads. `admit` makes a new communicator."""
        old, self._communicator = self._communicator, None
        if old is not None:
            old.close()


def _through_gloo(name: str) -> Any:
    """Return the method that has the gloo group of the quorum run the collective ``name``."""

    def run(group: ProcessGroupFTAR, *args: Any, **named: Any) -> Work:
        return group._current().run_gloo(name, *args, **named)

    return run


class ProcessGroupFTAR(ProcessGroup):
    """A process group of torchft that sums with the fault-tolerant all-reduce (FT-HSDP §4.2).

    After an error every call raises it and `errored` returns it, until the next `configure` or `reconfigure`.

    Args:
        timeout: How long `configure` waits for the other ranks, and how long a neighbour may be silent in a sum.
        host: The IPv4 address at which the others call; by default the one that leads to the store, and in a
            handle the one that leads to torchft's lighthouse.
        settings: Transport and sizes of the ring; the same on all ranks.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        host: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(0, 1)
        self._timeout = timeout
        self._host = host
        self._member = TorchftMember(settings or Settings())
        self._quorum: Quorum | None = None
        self._patience = Patience(0.0)  # of the last configure
        self._down = False
        self._identity = secrets.token_hex(16)  # in the handles
        self._served: handles.ServedStore | None = None  # where the ranks meet, if this one's handle is the first
        self._global_rank: int | None = None
        self._count = 0  # of reconfigures
        self._memberships: set[str] = set()  # their names
        self._lock = threading.Lock()
        self._joining = threading.Lock()  # held while a quorum is formed
        # A group that is garbage-collected without `shutdown` must end its threads. A thread of its own closes the
        # member, because the collection may happen on one of the threads that `close` joins.
        drop = threading.Thread(target=self._member.close, name="ftar-drop", daemon=True)
        weakref.finalize(self, drop.start).atexit = False

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leave the old quorum and connect to the ranks of the new one. Blocks. torchft's Manager calls it.

        Args:
            store_addr: "host:port/prefix" of torchft's store, with a prefix that was never used before.
            replica_id: Not used.
            quorum_id: Not used: a restarted lighthouse begins again at 1.
            group_rank: Not used.
            group_world_size: Not used.
            global_ranks: Not used.

        Raises:
            RuntimeError: The ranks did not come within the timeout, the connections failed, or `abort` was called.
        """
        self._join(store_addr, rank, world_size, self._timeout)

    @property
    def supports_reconfigure(self) -> bool:
        """True: `reconfigure` is there."""
        return True

    def set_rank_info(
        self, replica_id: str, group_rank: int, group_world_size: int, global_rank: int | None = None
    ) -> None:
        """Set what handles tell about this process. torchft's Manager calls it.

        Args:
            replica_id: Not used.
            group_rank: Not used.
            group_world_size: Not used.
            global_rank: The number of this process in its job.
        """
        self._global_rank = global_rank

    def _handle_id(self) -> str:  # torchft's wrappers of process groups look for it among the handles
        return self._identity

    def get_reconfigure_handle(self) -> str:
        """Return the handle by which others name this group in `reconfigure`.

        It stays valid until `shutdown`. The first call starts the store at which the ranks meet if this handle is
        the first of theirs.

        Raises:
            OSError: The name of this host or of torchft's lighthouse is not known.
            RuntimeError: No port is free.
        """
        with self._lock:
            if self._served is None:
                self._served = handles.ServedStore(self._host or handles.own_host())
            return handles.encode(self._identity, self._served.address, self._global_rank, self._count)

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Leave the old quorum and connect to the groups that ``opts.handles`` name, in this order. Blocks.

        An error of the options leaves the old quorum as it is; every other one ends it. After an error the groups
        need a new uuid, or new handles. Returns a work that is done.

        Args:
            opts: ``uuid`` names the quorum; with the same handles it must be new. ``timeout`` bounds the call;
                None: the group's own. Hints are not used.

        Raises:
            InvalidArgument: A handle is malformed or there twice, this group's own is not among them, or the
                group was in this quorum before.
            RuntimeError: The ranks did not come within the timeout, one of them gave up, the connections failed,
                or `abort` was called.
        """
        quorum = handles.membership(opts, self._identity)
        with self._lock:
            if self._served is None or quorum.own != self._served.address:
                raise InvalidArgument("handles: got one from before this group's shutdown; allowed: a new one")
            if quorum.name in self._memberships:
                raise InvalidArgument(f"uuid: got {opts.uuid} once more for the same handles; allowed: a new one")
            self._served.forget(self._memberships)
            self._memberships.add(quorum.name)
            self._count += 1
        self._join(
            f"{quorum.store}/{handles.KEYS}{quorum.name}", quorum.rank, quorum.size, opts.timeout or self._timeout
        )
        return DoneWork()

    def _join(self, store_addr: str, rank: int, size: int, timeout: timedelta) -> None:
        """Leave the old quorum and form that of ``size`` ranks who meet at ``store_addr``."""
        patience = Patience(timeout.total_seconds())
        with self._lock:
            self._retire()
            self._patience, self._down = patience, False
        while not self._joining.acquire(timeout=SLICE_S):  # the call before ends soon: it was cancelled
            self._member.abort("a newer quorum")
            patience.check("the call before has not ended")
        try:
            self._meet(store_addr, rank, size, patience)
        finally:
            self._joining.release()

    def _meet(self, store_addr: str, rank: int, size: int, patience: Patience) -> None:
        """Form the quorum; no other one is formed meanwhile."""
        meeting: TorchftRendezvous | None = None
        try:
            store = self._store(store_addr, patience)
            meeting = TorchftRendezvous(store, rank, size, patience)
            ring = self._form(store.underlying_store, meeting, patience)
            gloo = connect_gloo(store, rank, size, patience, self._timeout, self._member.broken)
            with self._lock:
                if patience.cancelled.is_set():
                    raise RuntimeError("aborted: while it was configured")
                self._quorum = Quorum(ring, self._member.communicator, gloo)
        except BaseException as error:
            if meeting is not None:
                meeting.give_up(str(error))
            self._member.abort("a rank could not be configured")
            if self._down:
                self._member.close()
            raise

    def _store(self, where: str, patience: Patience) -> Any:
        missing = f"Socket Timeout: no store at {where}"
        try:
            timeout = timedelta(seconds=patience.left_s)
            return patience.run(lambda: create_store_client(where, timeout=timeout), missing)
        except DistNetworkError as error:
            raise RuntimeError(f"{missing}: {first_line(error)}") from error

    def _form(self, server: Any, meeting: TorchftRendezvous, patience: Patience) -> RingAddresses:
        """Meet the other ranks at the store, and form their ring."""
        seconds = self._timeout.total_seconds()
        member = self._member
        host = self._host or address.source(server.host, server.port, socket.AF_INET)
        ring = meeting.meet(member.token, member.epoch, lambda token: member.admit(token, host, seconds))
        member.epoch = ring.epoch
        try:
            member.communicator.reconfigure(ring.epoch, ring.members, patience.left_s)
        except FTARError as error:
            if patience.cancelled.is_set():
                raise RuntimeError("aborted: while it was configured") from error
            ranks = {number: place for place, (number, _) in enumerate(ring.members)}
            raise RuntimeError(translated(error, ranks)) from error
        return ring

    def _retire(self) -> None:
        self._patience.cancelled.set()
        if self._quorum is not None:
            self._quorum.retire()
        self._quorum = None

    def _current(self) -> Quorum:
        quorum = self._quorum
        if quorum is None:
            raise RuntimeError("process group not initialized")
        if quorum.error is not None:
            raise quorum.error
        return quorum

    # Sums.

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions | ReduceOp | ReduceOp.RedOpType) -> Work:
        """Reduce each of ``tensors`` over the ranks, in place. Returns at once.

        SUM and AVG of fp64, fp32, bf16, fp16, int64 and int32 go through FTAR, all else through gloo. A contiguous
        CPU tensor that is alone is summed where it is; others are copied to the host and back. After an error the
        content of the tensors is undefined.

        Args:
            tensors: Of any shapes and devices; the same shapes and types on all ranks.
            opts: The operation, or options with a ``reduceOp``.

        Raises:
            RuntimeError: There is no quorum, an error ended it, or AVG was asked of integers.
        """
        op: Any = getattr(opts, "reduceOp", opts)
        quorum = self._current()
        average = op == ReduceOp.AVG
        if not (average or op == ReduceOp.SUM) or not tensors or not all(map(_summable, tensors)):
            return _gloo_reduction(quorum, tensors, op)
        if not average:
            return quorum.sum(tensors, 1)
        if not all(t.is_floating_point() for t in tensors):
            raise RuntimeError("ReduceOp.AVG is for floating-point tensors")
        return quorum.sum(tensors, quorum.size)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions) -> Work:
        """Reduce each of ``tensors`` as `allreduce` does, which also lets small tensors share a ring operation."""
        return self.allreduce(tensors, opts)

    # The rest, with the arguments of torch.distributed.

    allgather = _through_gloo("allgather")
    allgather_into_tensor_coalesced = _through_gloo("allgather_into_tensor_coalesced")
    alltoall_base = _through_gloo("alltoall_base")
    broadcast = _through_gloo("broadcast")
    reduce_scatter = _through_gloo("reduce_scatter")
    reduce_scatter_tensor_coalesced = _through_gloo("reduce_scatter_tensor_coalesced")

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> Work:
        return self._current().run_gloo("send", tensors, dst_rank, tag)

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> Work:
        return self._current().run_gloo("recv", tensors, src_rank, tag)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:
        return self._current().run_gloo("barrier", opts or BarrierOptions())

    # The group itself.

    def size(self) -> int:
        """Return the number of ranks in the quorum.

        Raises:
            RuntimeError: The group is in no quorum.
        """
        if self._quorum is None:
            raise RuntimeError("process group not initialized")
        return self._quorum.size

    def getBackendName(self) -> str:
        """Return the group's name among torch's backends."""
        return "torchft-ftar"

    def errored(self) -> RuntimeError | None:
        """Return the error that ended the quorum ("aborted: ..."), or None."""
        quorum = self._quorum
        return quorum.error if quorum is not None else None

    def abort(self, errored: bool = True) -> None:
        """Abort the quorum on all its ranks. Sums fail at once; calls of gloo fail then or at their timeout."""
        with self._lock:
            self._patience.cancelled.set()
            if self._quorum is not None:
                self._quorum.fail(RuntimeError("aborted"))
            else:
                self._member.abort("aborted")

    def shutdown(self) -> None:
        """Leave the quorum, stop the store of the handles, and end the threads. `configure` starts them again."""
        with self._lock:
            self._retire()
            self._down, self._served = True, None
        self._member.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, which holds from the next `configure` or `reconfigure` on."""
        self._timeout = timeout


def _summable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.dtype in DTYPES


def _gloo_reduction(quorum: Quorum, tensors: Sequence[Tensor], op: Any) -> Work:
    """Reduce through gloo. Its plain all-reduce of a list would add the list's tensors to each other."""
    opts = AllreduceOptions() if len(tensors) == 1 else AllreduceCoalescedOptions()
    opts.reduceOp = op
    return quorum.run_gloo("allreduce" if len(tensors) == 1 else "allreduce_coalesced", tensors, opts)
