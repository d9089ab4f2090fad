"""The ranks of one ``configure`` or ``reconfigure``: their meeting, ring, gloo group, and first error.

`TorchftRendezvous` runs over a store of torch in two rounds, in each of which every rank writes one key and reads
all. In the first round a rank writes the secret of its communicator and the largest epoch that it has claimed. The
secret of the rank with the largest epoch is kept, because most connections are between ranks that have it; the new
epoch is one larger. In the second round a rank writes its member number and its address. A rank that cannot go on
says so in a third key, and the others end at once.

`connect_gloo` makes torch's own gloo group over the same store, for everything that is not a sum. `Quorum` holds
both and the first error of either. `Patience` bounds every wait of this.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed import DistError, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work

from ft_hsdp.compat.torchft.handles import GAVE_UP
from ft_hsdp.compat.torchft.work import GlooWork, SumWork, bundles
from ft_hsdp.errors import FTARError, PeerTimeout, RecoverableError
from ft_hsdp.ftar import Communicator

T = TypeVar("T")

GRACE_S = 0.25  # how long a call may take beyond the deadline that it has itself
SLICE_S = 0.02  # between two looks at whether a wait was cancelled


class Patience:
    """The deadline of one ``configure`` or ``reconfigure``, which another thread may cancel."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.cancelled = threading.Event()
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """The seconds that are left; at least a millisecond, which torch's timeouts need."""
        return max(0.001, self._end - time.monotonic())

    def check(self, missing: str) -> None:
        """Check that there is time left.

        Raises:
            RuntimeError: There is none, since ``missing``; or the wait was cancelled.
        """
        if self.cancelled.is_set():
            raise RuntimeError("aborted: the rendezvous was cancelled")
        if time.monotonic() > self._end:
            raise RuntimeError(f"{missing}: timeout after {self.timeout_s * 1e3:.0f}ms")

    def run(
        self,
        call: Callable[[], T],
        missing: str,
        drop: Callable[[T], object] = lambda _: None,
        lost: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return what ``call`` returns; it runs on a thread of its own.

        Torch's client of a store waits without end for a server that is stopped, and cannot be told to return.
        Then the thread is left behind, until the server goes on or ends.

        Args:
            call: Has a deadline of its own, as far as torch lets it.
            missing: What the error says if it does not return in time.
            drop: Called with a result that came too late.
            lost: Says that a rank is gone, and the call in vain.

        Raises:
            RuntimeError: It did not return in time, a rank is gone, or the wait was cancelled.
        """
        result: futures.Future[T] = futures.Future()
        threading.Thread(target=_run, args=(call, result, drop), name="ftar-store", daemon=True).start()
        while futures.wait([result], SLICE_S).not_done:
            gone = lost()
            late = self.cancelled.is_set() or time.monotonic() > self._end + GRACE_S
            if (gone or late) and result.cancel():
                self.check(missing)
                raise RuntimeError(f"Connection closed by peer: {missing}, and a rank is gone")
        return result.result()


def _run(call: Callable[[], T], result: futures.Future[T], drop: Callable[[T], object]) -> None:
    try:
        value = call()
    except BaseException as error:
        if result.set_running_or_notify_cancel():
            result.set_exception(error)
        return
    if result.set_running_or_notify_cancel():
        result.set_result(value)
    else:
        drop(value)


def connect_gloo(
    store: Store, rank: int, size: int, patience: Patience, timeout: timedelta, lost: Callable[[], bool]
) -> ProcessGroup:
    """Connect ``size`` ranks by gloo. Blocks until all of them are there.

    Args:
        store: With a prefix that was never used before.
        patience: How long to wait.
        timeout: Of the group's collectives.
        lost: Says that a rank is gone.

    Raises:
        RuntimeError: A rank was not there in time, or is gone.
    """

    def connect() -> ProcessGroupGloo:
        made = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timedelta(seconds=patience.left_s))
        made._set_sequence_number_for_group()
        return made

    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    backend = patience.run(connect, "gloo is not connected", ProcessGroupGloo.abort, lost)
    backend._set_default_timeout(timeout)
    for device in {"cpu", *([acc.type] if (acc := torch.accelerator.current_accelerator()) else [])}:
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    return group


SHORTEST_S, LONGEST_S = 0.0002, 0.003  # between two looks at a key: the store's own wait cannot be cancelled
MAX_VALUE = 1000  # bytes of a key's value

_Claim = tuple[Annotated[int, Field(ge=0, lt=2**32)], Annotated[str, Field(max_length=128)]]
_Place = tuple[Annotated[int, Field(ge=0, lt=2**48)], Annotated[str, Field(max_length=300)]]
CLAIM: TypeAdapter[_Claim] = TypeAdapter(_Claim)  # epoch and secret; of a rank that gave up: rank and reason
PLACE: TypeAdapter[_Place] = TypeAdapter(_Place)  # member number and address


@dataclass(frozen=True, slots=True)
class RingAddresses:
    """The members of the ring of ``epoch``."""

    epoch: int
    members: tuple[tuple[int, str], ...]  # (member number, "host:port") by rank


class TorchftRendezvous:
    """The meeting of ``size`` ranks over ``store``, whose prefix was never used before, within ``patience``."""

    def __init__(self, store: Store, rank: int, size: int, patience: Patience) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._patience = patience

    def meet(self, token: str, epoch: int, admit: Callable[[str], tuple[int, str]]) -> RingAddresses:
        """Agree on secret, epoch and members. Blocks.

        Args:
            token: The secret of this rank's communicator.
            epoch: The largest epoch that this rank has claimed.
            admit: Called with the agreed secret; returns this rank's (member number, "host:port").

        Raises:
            RuntimeError: A rank did not come in time, gave up or wrote something invalid; the store is gone; or
                the rendezvous was cancelled.
        """
        claims = self._exchange("claim", [epoch, token], CLAIM)
        floor = max(claim[0] for claim in claims)
        secret = next(claim[1] for claim in claims if claim[0] == floor)
        places = self._exchange("place", list(admit(secret)), PLACE)
        return RingAddresses(floor + 1, tuple(places))

    def give_up(self, reason: str) -> None:
        """Tell the ranks that still wait why this one cannot go on. Returns at once.

        Of several ranks the first one is heard.
        """
        said = json.dumps([self._rank, " ".join(reason.split())[:100]])

        def say() -> None:
            with contextlib.suppress(RuntimeError):  # the store may be what is gone
                self._store.compare_set(GAVE_UP, "", said)

        threading.Thread(target=say, name="ftar-store", daemon=True).start()

    def _exchange(self, name: str, value: list[int | str], shape: TypeAdapter[T]) -> list[T]:
        def exchange() -> list[T]:
            self._store.set(f"{name}/{self._rank}", json.dumps(value))
            return [self._read(f"{name}/{rank}", rank, shape) for rank in range(self._size)]

        try:
            return self._patience.run(exchange, "the store of the ranks does not answer")
        except DistError as error:
            raise RuntimeError(
                f"Connection closed by peer: the store of the ranks: {first_line(error)}"
            ) from error

    def _read(self, key: str, rank: int, shape: TypeAdapter[T]) -> T:
        pause = SHORTEST_S
        while not self._store.check([key]):
            if self._store.check([GAVE_UP]):
                raise RuntimeError(f"Connection closed by peer: {_reason(self._store.get(GAVE_UP))}")
            self._patience.check(f"rank {rank} of {self._size} did not come to the store")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
        raw = self._store.get(key)
        try:
            return shape.validate_json(raw[:MAX_VALUE], strict=True)
        except ValidationError as error:
            raise RuntimeError(
                f"rank {rank} wrote {raw[:60]!r} under {key}; allowed: a number and a text"
            ) from error


def _reason(raw: bytes) -> str:
    try:
        rank, why = CLAIM.validate_json(raw[:MAX_VALUE], strict=True)
    except ValidationError:
        return "a rank gave up"
    return f"rank {rank} gave up: {why}"


def first_line(error: BaseException) -> str:
    """Return what ``error`` says, without the stack of C++ calls that torch adds."""
    return str(error).partition("\n")[0][:200]


# torchft and training loops recognize errors of process groups by gloo's words.
GLOO_WORDS: tuple[tuple[type[FTARError], str], ...] = (
    (PeerTimeout, "Timed out waiting"),
    (RecoverableError, "Connection closed by peer"),
)


class Quorum:
    """The ranks of one ``configure``: their ``ring``, formed in ``communicator``, and their ``gloo`` group."""

    def __init__(self, ring: RingAddresses, communicator: Communicator, gloo: ProcessGroup) -> None:
        self.size = len(ring.members)
        self.error: RuntimeError | None = None  # the first one; it ended the quorum
        self._ranks = {number: rank for rank, (number, _) in enumerate(ring.members)}
        self._communicator = communicator
        self._gloo: ProcessGroup | None = gloo
        self._lock = threading.Lock()
        self._over = False

    def sum(self, tensors: Sequence[Tensor], divisor: int) -> Work:
        """Sum each of ``tensors`` over the ranks in place, and divide by ``divisor``. Returns at once."""
        parts = bundles(tensors)
        works = [self._communicator.all_reduce(b.flat, preserve_input=False) for b in parts]
        return SumWork(tensors, parts, works, divisor, self.fail)

    def run_gloo(self, name: str, *args: Any, **named: Any) -> Work:
        """Start the collective ``name`` of the gloo group, with these arguments.

        Raises:
            RuntimeError: The quorum has been retired.
        """
        gloo = self._gloo
        if gloo is None:
            raise RuntimeError("process group not initialized")
        return GlooWork(getattr(gloo, name)(*args, **named), self.fail)

    def fail(self, error: BaseException) -> RuntimeError:
        """Return ``error`` in torch's words. The first one ends the quorum, and all its ranks learn of it."""
        told = RuntimeError(translated(error, self._ranks))
        with self._lock:
            if not self._over:
                self._over = True
                self.error = RuntimeError(f"aborted: {told}" if str(told) != "aborted" else "aborted")
                self._communicator.abort(str(told))
        return told

    def retire(self) -> None:
        """End the quorum and ignore its later errors. Gloo ends on a thread of its own; nothing waits for it."""
        with self._lock:
            self._over = True
            gloo, self._gloo = self._gloo, None
        if gloo is not None:
            threading.Thread(target=gloo.abort, name="ftar-gloo-end").start()


def translated(error: BaseException, ranks: dict[int, int]) -> str:
    """Return the message of ``error`` in gloo's words, with ranks in place of member numbers."""
    text = re.sub(r"\breplica (\d+)", lambda found: f"rank {ranks.get(int(found[1]), '?')}", str(error))
    words = next((words for kind, words in GLOO_WORDS if isinstance(error, kind)), None)
    if words is None:
        return f"{type(error).__name__}: {text}" if isinstance(error, FTARError) else text
    return f"{words}: {text}"
