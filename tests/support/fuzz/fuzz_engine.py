"""A mutator with a seed, and a loop that feeds what it makes to a parser within bounds on time and memory."""

import contextlib
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SIZE = 1 << 16  # longest input in bytes, but for one in a thousand
MOST = 1 << 20
SLOW_S = 2.0  # of processor time for one input: linear work on MOST bytes is far below
ROOM = 1 << 30  # bytes of address space that a parser may take beside what its process has

TOKENS = [
    *(
        b"\0",
        b"\xff" * 4,
        b"\xff" * 8,
        b"\0\0\0\0",
        b"\x7f\xff\xff\xff",
        b"\x80\0\0\0",
        b"\r\n",
        b"\r\n\r\n",
        b"\n",
    ),
    *(b"[", b"]", b"{", b"}", b'"', b":", b",", b"null", b"true", b"-1", b"1e999", b"NaN", b"9" * 25, b"[" * 50),
    *(
        b'{"a":' * 20,
        b"\\u0000",
        b"\\ud800",
        b"\xc3\xa9",
        b"\xed\xa0\x80",
        b"&a [*a]",
        b"<<: *a",
        b"!!python/name:x",
    ),
    *(b"Content-Length: ", b"Transfer-Encoding: chunked", b"Range: bytes=", b"HTTP/1.1 ", b"GET ", b" HTTP/1.0"),
    *(b'"type"', b'"body"', b'"grant"', b'"members"', b"0" * 32, b"[::1]:80", b"%s", b"../"),
]


@dataclass(frozen=True)
class Parser:
    """What is fuzzed: `parse` may raise only `allowed`; `seeds` are inputs that it accepts."""

    parse: Callable[[bytes], object]
    seeds: Sequence[bytes]
    allowed: tuple[type[Exception], ...]


class Mutator:
    """Inputs like the seeds, and less and less so; the same ones for the same seed."""

    def __init__(self, seeds: Sequence[bytes], seed: int) -> None:
        self._chance = random.Random(seed)
        self._pool = list(seeds) or [b""]

    def keep(self, data: bytes) -> None:
        """An input that was accepted: others are made from it."""
        if len(self._pool) < 512:
            self._pool.append(data)
        else:
            self._pool[self._chance.randrange(len(self._pool))] = data

    def next(self) -> bytes:
        chance = self._chance
        data = bytearray(self._pool[int(chance.random() * len(self._pool))])
        for _ in range(1 + int(chance.random() ** 3 * 8)):
            self._mutate(data)
        if chance.random() < 0.001 and data:
            data = data * (MOST // len(data))
            return bytes(data[:MOST])
        return bytes(data[:SIZE])

    def _mutate(self, data: bytearray) -> None:
        chance = self._chance
        kind, at = int(chance.random() * 8), int(chance.random() * (len(data) + 1))
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << int(chance.random() * 8)
        elif kind == 1 and data:
            data[at % len(data)] = int(chance.random() * 256)
        elif kind == 2:
            data[at:at] = TOKENS[int(chance.random() * len(TOKENS))]
        elif kind == 3:
            del data[at : at + 1 + int(chance.random() ** 4 * 64)]
        elif kind == 4:
            end = at + 1 + int(chance.random() ** 4 * 64)
            data[at:at] = data[at:end] * (1 + int(chance.random() ** 8 * 64))
        elif kind == 5:
            del data[at:]
        elif kind == 6:
            other = self._pool[int(chance.random() * len(self._pool))]
            begin = int(chance.random() * (len(other) + 1))
            data[at:] = other[begin:]
        else:
            end = at + int(chance.random() * 8)
            data[at:end] = TOKENS[int(chance.random() * len(TOKENS))][: end - at + 4]


def fuzz(parser: Parser, runs: int, seed: int, keep_every: int = 50) -> dict[str, float]:
    """Feed `runs` inputs to a parser; what it took.

    Raises whatever the parser raises and may not, with the input, and AssertionError for one that takes too long.
    """
    mutator, accepted = Mutator(parser.seeds, seed), 0
    slowest, began = 0.0, time.process_time()
    for each in parser.seeds:
        with contextlib.suppress(*parser.allowed):
            parser.parse(each)
    last = time.process_time()
    for number in range(runs):
        data = mutator.next()
        try:
            parser.parse(data)
        except parser.allowed:
            pass
        except BaseException as error:
            error.add_note(f"input {number} of seed {seed}: {data[:2000]!r}")
            raise
        else:
            accepted += 1
            if accepted % keep_every == 0:
                mutator.keep(data)
        if number % 64 == 0 or len(data) > SIZE:
            now = time.process_time()
            slowest = max(slowest, now - last)
            assert now - last < SLOW_S, (
                f"input {number} of seed {seed}, or one of 64 before it, took {now - last} s"
            )
            last = now
    took = time.process_time() - began
    return {"runs": runs, "accepted": accepted, "cpu_s": round(took, 1), "slowest_s": round(slowest, 3)}


def bounded() -> None:
    """This process gets ROOM bytes beside what it has: a parser that allocates more dies of MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
