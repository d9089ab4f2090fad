"""The keys and values with which the ranks of one replica form their process group: a table in rank 0.

`checked` bounds what a call may bring, `KeyTable` answers it, and `TableServer` takes the calls of the other ranks
from their connections. Several calls of a rank may wait at once; the constants bound what a rank can use.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections import Counter
from collections.abc import Sequence

from ft_hsdp.control.rank_channel import RankHub
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import StoreAnswer, StoreCall

MAX_KEY = 1024  # bytes
MAX_NAMES = 96 << 10  # bytes of a call's keys: a message holds them beside MAX_VALUE even if JSON escapes them all
MAX_VALUE = 256 << 10  # bytes of a call's values
MAX_KEYS = 1 << 16
MAX_BYTES = 64 << 20  # of all keys and values
MAX_CALLS = 64  # of one rank at a time; with one more its connection is closed
NUMBERS = 1 << 63
SHOWN = 80  # characters of a key in a message
NEEDS: dict[str, tuple[int | None, int]] = {
    "set": (1, 1),
    "get": (1, 0),
    "add": (1, 0),
    "check": (None, 0),
    "wait": (None, 0),
    "compare_set": (1, 2),
    "delete": (1, 0),
    "count": (0, 0),
}
"""How many keys (None: any number) and values a call has."""
_NUMBER = re.compile(rb"-?[0-9]{1,19}")


class CallRefused(Exception):
    """A call that cannot be answered; `str()` is one line for the caller."""


def packed(values: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(base64.b64encode(value).decode() for value in values)


def unpacked(value: str) -> bytes:
    """Return a value from its base64.

    Raises:
        CallRefused: it is no base64.
    """
    try:
        return base64.b64decode(value, validate=True)
    except ValueError:
        raise CallRefused("a value that is no base64") from None


def checked(call: StoreCall) -> list[bytes]:
    """Return the values of a call that keeps all bounds that can be checked without the table.

    Raises:
        CallRefused: it does not keep them.
    """
    keys, values = NEEDS[call.what]
    if len(call.keys) != (len(call.keys) if keys is None else keys) or len(call.values) != values:
        raise CallRefused(f"{call.what} of {len(call.keys)} keys and {len(call.values)} values")
    if not -NUMBERS <= call.amount < NUMBERS:
        raise CallRefused("an amount that is no number of 64 bits")
    names = 0
    for key in call.keys:
        try:
            nbytes = len(key.encode())
        except UnicodeEncodeError:
            raise CallRefused(f"a key that is no text: {_shown(key)}") from None
        if nbytes > MAX_KEY:
            raise CallRefused(f"a key of {nbytes} bytes ({_shown(key)}); allowed: {MAX_KEY}")
        names += nbytes
    if names > MAX_NAMES:
        raise CallRefused(f"{len(call.keys)} keys of {names} bytes in one call; allowed: {MAX_NAMES}")
    found = [unpacked(value) for value in call.values]
    if (nbytes := sum(map(len, found))) > MAX_VALUE:
        raise CallRefused(f"a value of {nbytes} bytes for {_shown(call.keys[0])}; allowed: {MAX_VALUE}")
    return found


class KeyTable:
    """Keys and values. Used on one event loop.

    Args:
        most_keys: of all.
        most_bytes: of all keys and values.
    """

    def __init__(self, most_keys: int = MAX_KEYS, most_bytes: int = MAX_BYTES) -> None:
        self._most_keys = most_keys
        self._most_bytes = most_bytes
        self._values: dict[str, bytes] = {}
        self.nbytes = 0
        self._coming: dict[str, set[asyncio.Future[None]]] = {}

    async def answer(self, call: StoreCall) -> StoreAnswer:
        """Do what `call` asks for, and return its answer.

        A call that waits for keys waits for its `wait_s` at most.
        """
        try:
            amount, value = await self._do(call, checked(call))
        except CallRefused as error:
            return StoreAnswer(call.number, error=str(error))
        return StoreAnswer(call.number, amount, *packed([value]))

    async def _do(self, call: StoreCall, values: list[bytes]) -> tuple[int, bytes]:
        key = call.keys[0] if call.keys else ""
        match call.what:
            case "set":
                self._put(key, values[0])
            case "get":
                await self._wait(call.keys, call.wait_s)
                return 0, self._values[key]
            case "wait":
                await self._wait(call.keys, call.wait_s)
            case "check":
                return int(all(each in self._values for each in call.keys)), b""
            case "add":
                total = self._number(key) + call.amount
                if not -NUMBERS <= total < NUMBERS:
                    raise CallRefused(f"{_shown(key)} has {total} now, which is no number of 64 bits")
                self._put(key, str(total).encode())
                return total, b""
            case "compare_set":
                return 0, self._compare_set(key, *values)
            case "delete":
                value = self._values.pop(key, None)
                self.nbytes -= 0 if value is None else len(key.encode()) + len(value)
                return int(value is not None), b""
            case "count":
                return len(self._values), b""
        return 0, b""

    def _number(self, key: str) -> int:
        value = self._values.get(key, b"0")
        if not _NUMBER.fullmatch(value):
            raise CallRefused(f"{_shown(key)} has {value[:20]!r}, which is no number")
        return int(value)

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Return the value that `key` has then, as torch does.

        An empty `expected` sets a key that has no value.
        """
        has = self._values.get(key)
        if has == expected or (has is None and not expected):
            self._put(key, desired)
            return desired
        return expected if has is None else has

    def _put(self, key: str, value: bytes) -> None:
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else len(value) + len(key.encode())
        if before is None and len(self._values) >= self._most_keys:
            there = f"there are {self._most_keys} keys, as many as are allowed"
            raise CallRefused(f"no place for {_shown(key)}: {there}")
        if self.nbytes + more > self._most_bytes:
            raise CallRefused(f"no place for {_shown(key)}: keys and values may have {self._most_bytes} bytes")
        self._values[key] = value
        self.nbytes += more
        for future in self._coming.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def _wait(self, keys: Sequence[str], wait_s: float) -> None:
        """Wait until all `keys` have values. Raises CallRefused after `wait_s` seconds."""
        try:
            async with asyncio.timeout(wait_s):
                for key in keys:
                    while key not in self._values:
                        await self._set(key)
        except TimeoutError:
            missing = [each for each in keys if each not in self._values]
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CallRefused(
                f"no rank has set {_shown(missing[0] if missing else key)}{more} within {wait_s:g} s"
            ) from None

    async def _set(self, key: str) -> None:
        future = asyncio.get_running_loop().create_future()
        waiting = self._coming.setdefault(key, set())
        waiting.add(future)
        try:
            await future
        finally:
            waiting.discard(future)
            if not waiting and self._coming.get(key) is waiting:
                del self._coming[key]


class TableServer(RankHub):
    """Serves the table of rank 0 to the other ranks, on one event loop."""

    def __init__(self, ranks: int, token: str, table: KeyTable) -> None:
        # A rank that has ended, or that sends anything but calls, loses its connection.
        super().__init__(ranks, token, self._called, self.hang_up, Purpose.STORE, (StoreCall,))
        self._table = table
        self._calls: Counter[int] = Counter()
        self._answers: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Close all connections; calls that wait get no answer."""
        super().close()
        for task in self._answers:
            task.cancel()

    def _called(self, call: object) -> None:
        if not isinstance(call, StoreCall) or call.rank not in self.hellos:
            return
        if self._calls[call.rank] >= MAX_CALLS:
            self.hang_up(call.rank)
            return
        self._calls[call.rank] += 1
        task = asyncio.get_running_loop().create_task(self._answer(call))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, call: StoreCall) -> None:
        try:
            with contextlib.suppress(OSError):  # it is gone
                await self.tell(call.rank, await self._table.answer(call))
        finally:
            self._calls[call.rank] -= 1


def _shown(key: str) -> str:
    text = repr(key[:SHOWN])
    return text if len(key) <= SHOWN and len(text) <= 2 * SHOWN else f"{text[:SHOWN]}..."
