"""The torch.distributed store in which the ranks of one replica form their process group.

Torch's own store, TCPStore, knows no token: every process that reaches its port can read and set keys, also in the
place of a rank. This one is a table in rank 0 (`key_table`). The other ranks reach it over a connection each
(`rank_channel`), which begins with the handshake and is encrypted as `network.tls` says. Rank 0 listens until all
of them are here. `RankStore` is what torch calls.

It serves neither NCCL (`train.device: cuda`) nor ranks that torchrun starts: those have torch's. NCCL's monitor
asks its store every second from a thread that is not Python's, for as long as the process lives. A store in Python
would make it wait for the interpreter, whose hang it is there to see, and such a thread can end the process with
another exit code while the interpreter shuts down. Gloo asks while a group is made, on the thread that makes it.

The object has to live as long as its process group: torch alone keeps only the C++ part of it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import socket
import threading
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from ft_hsdp import address, caller_gate
from ft_hsdp.control.key_table import CallRefused, KeyTable, TableServer, checked, packed, unpacked
from ft_hsdp.control.rank_channel import RankLine
from ft_hsdp.errors import Retryable, exhausted
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import RankHello, StoreAnswer, StoreCall

AGAIN_S, PAUSE_S = 0.02, 0.2  # between the first two calls of a rank 0 that does not listen yet, and later
CLOSE_S = 5.0
MAX_WAIT_S = 1e9
What = Literal["set", "get", "add", "check", "wait", "compare_set", "delete", "count"]
Result = TypeVar("Result")


class _RemoteTable:
    """The table of rank 0, as another rank reaches it. Used on one event loop."""

    def __init__(self, rank: int, token: str) -> None:
        self._rank = rank
        self._waiting: dict[int, asyncio.Future[StoreAnswer]] = {}
        self._here = self._gone = False
        self._line = RankLine(token, self._answered, self._lost, Purpose.STORE, (StoreAnswer,))
        self.failure: Exception | None = None

    async def connect(self, host: str, port: int) -> None:
        """Connect to rank 0 until it lets this rank in; until cancelled.

        `failure` is why it did not, the last time.

        Raises:
            LocalResourceError: this process has run out of a resource.
            ProtocolViolation: what listens there does not know the token.
        """
        pause_s = AGAIN_S
        while not self._here:
            try:
                await self._line.connect(host, port, RankHello(self._rank, "", ""))
                self._here = True
            except OSError as error:
                if (lacking := exhausted(error)) is not None:
                    raise lacking from error
                self.failure = error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S)

    async def answer(self, call: StoreCall) -> StoreAnswer:
        """Have rank 0 do what `call` asks for, and return its answer; until cancelled. Raises ConnectionError."""
        if self._gone:
            raise ConnectionResetError("it is gone")
        future = self._waiting[call.number] = asyncio.get_running_loop().create_future()
        self._line.send(call)
        try:
            return await future
        finally:
            del self._waiting[call.number]

    def close(self) -> None:
        self._gone = True
        if self._here:
            self._line.close()

    def _answered(self, answer: object) -> None:
        if isinstance(answer, StoreAnswer):
            future = self._waiting.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    def _lost(self) -> None:
        self._gone = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError("it is gone"))


class RankStore(dist.Store):
    """A store for the ranks of one replica; made by `serve` on rank 0 and by `connect` elsewhere.

    Its methods are those of torch's TCPStore and raise its errors: DistStoreError where a key does not get a
    value in time or a bound does not allow it, DistNetworkError where rank 0 is gone or does not answer. Every
    thread may call them. They block, at most for `timeout`, or the time that they are given, and
    `caller_gate.hello_s` more.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._rank = rank
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._closed = False
        self._table: KeyTable | _RemoteTable
        self._server: TableServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rank-store", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a loop whose tasks are still open says so when the interpreter ends

    def _run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Run a coroutine on the loop. Raises TimeoutError, ConnectionError, and what it raises itself."""
        with self._lock:  # what is begun before `close` is cancelled by it
            if self._closed:
                coroutine.close()
                raise ConnectionAbortedError("it is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ConnectionAbortedError("it is closed") from None
        finally:
            future.cancel()

    def _ask(
        self,
        what: What,
        keys: Sequence[str] = (),
        values: Sequence[str | bytes] = (),
        amount: int = 0,
        timeout: timedelta | None = None,
    ) -> StoreAnswer:
        allowed: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        wait_s = min(max(0.0, allowed.total_seconds()), MAX_WAIT_S)
        raw = packed([value.encode() if isinstance(value, str) else bytes(value) for value in values])
        call = StoreCall(self._rank, next(self._numbers), what, tuple(keys), raw, amount, wait_s)
        try:
            checked(call)
            answer = self._run(self._table.answer(call), wait_s + caller_gate.hello_s())
        except CallRefused as error:
            raise dist.DistStoreError(f"{what}: {error}") from None
        except TimeoutError:
            late = f"rank 0, which has the store of this replica, has not answered within {wait_s:g} s"
            raise dist.DistNetworkError(f"{what}: {late}") from None
        except OSError as error:
            gone = f"rank 0, which has the store of this replica, cannot be asked: {error}"
            raise dist.DistNetworkError(f"{what}: {gone}") from None
        if answer.error:
            raise dist.DistStoreError(f"{what}: {answer.error}")
        return answer

    # What torch calls; values and keys come as str from Python and as bytes from C++.

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [value])

    def get(self, key: str) -> bytes:
        return unpacked(self._ask("get", [key]).value)

    def add(self, key: str, value: int) -> int:
        """Add `value` to the number in `key` (0 if it has none), and return the sum."""
        return self._ask("add", [key], amount=value).amount

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", keys).amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout=timeout)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set `key` if it has the expected value, or has none and nothing is expected; return its value then."""
        return unpacked(self._ask("compare_set", [key], [expected_value, desired_value]).value)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._ask("count").amount

    deleteKey, getNumKeys = delete_key, num_keys  # C++ finds them by these names

    def clone(self) -> RankStore:
        """Return this store itself: its threads do not wait for each other."""
        return self

    # Beginning and end.

    def close(self) -> None:
        """Close the connections and end the thread. Waiting and later calls fail. May be called again."""
        with self._lock:
            if self._closed or not self._thread.is_alive():  # or this process was forked from its own
                return
            self._closed = True
            atexit.unregister(self.close)
            ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        with contextlib.suppress(TimeoutError):
            ending.result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        for each in (self._server, self._table):
            if isinstance(each, TableServer | _RemoteTable):
                each.close()
        await asyncio.sleep(0)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def serve(ranks: int, token: str, listener: socket.socket | None, timeout_s: float) -> RankStore:
    """Return the store of rank 0, once all other ranks are here. Blocks.

    Args:
        listener: a bound socket, which is closed when all are here; None where there is no other rank.
        timeout_s: longest wait for the ranks, in seconds, and default of the store's calls.

    Raises:
        Retryable: a rank did not come in time.
    """
    store = RankStore(0, timeout_s)
    table = store._table = KeyTable()
    if listener is None:
        return store
    server = store._server = TableServer(ranks, token, table)

    async def gather() -> None:
        server.open(listener)
        await server.all_here(timeout_s)

    try:
        store._run(gather(), timeout_s + caller_gate.hello_s())
    except TimeoutError:
        late = sorted(server.awaited)
        store.close()
        raise Retryable(f"ranks {late} of this replica have not come within {timeout_s:g} s") from None
    except BaseException:
        store.close()
        raise
    return store


def connect(rank: int, token: str, host: str, port: int, timeout_s: float) -> RankStore:
    """Return the store of another rank, once rank 0 has let it in. Blocks.

    Args:
        timeout_s: longest wait for rank 0, in seconds, and default of the store's calls.

    Raises:
        Retryable: rank 0 did not let it in in time.
        LocalResourceError: this process has run out of a resource.
        ProtocolViolation: what listens there does not know the token.
    """
    store = RankStore(rank, timeout_s)
    remote = store._table = _RemoteTable(rank, token)
    try:
        store._run(remote.connect(host, port), timeout_s)
    except TimeoutError:
        store.close()
        where, why = address.join(host, port), "" if remote.failure is None else f" ({remote.failure})"
        late = f"rank 0 of this replica has not let this rank in at {where} within {timeout_s:g} s{why}"
        raise Retryable(late) from None
    except BaseException:
        store.close()
        raise
    return store
