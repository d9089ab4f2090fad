"""What a batch is, as facts that can be compared: digests of samples and of tokens.

Each source of batches has ``facts``: names and values such as ``length: 160`` or ``sample 0: 5f...``. All replicas
of a job agree on them at the check-in, and a job with the checkpoint from which it resumes. A few samples are
read, each twice under one seed. A sample that differs from itself is `RANDOM`, one that cannot be read or hashed
is `UNKNOWN`; neither is compared. A fact for which there was no time is missing, and is not compared either: so
each group of samples has a fact of its own.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash

from ft_hsdp.core.randomness import Permutation, stream
from ft_hsdp.core.replica_state import RANDOM, UNKNOWN

PROBE_S = 2.0  # for all facts of a source; a read that takes longer is the last one
QUICK_S = 0.03  # beyond the first samples, so many more are read as this allows
FIRST = 5  # samples with a fact of their own: the first, the last, and some between
MAX_DEPTH = 32  # of what is hashed
BLOCK = 1 << 16  # bytes that are hashed at once
BLOCKS = (64, 4096)  # of a large array, spread evenly: for the first fact, and for the second
_PLAIN = (bool, int, float, complex, str, decimal.Decimal, range, datetime.date, datetime.time, datetime.timedelta)


def digest(value: Any) -> str:
    """Return the digest of a sample or a batch: 16 hex digits, the same in every process.

    Args:
        value: Numbers, text, bytes, times, tensors, numpy arrays, PIL images, enumerations, dataclasses, and
            lists, tuples, sets and mappings of them.

    Raises:
        TypeError: Something in it is of another type, or too deep.
    """
    into = xxhash.xxh3_64()
    _feed(into, value, 0)
    return into.hexdigest()


def _feed(into: Any, value: Any, depth: int) -> None:
    kind = type(value)

    def put(what: object, content: Any = b"") -> None:
        into.update(f"{what}:{memoryview(content).nbytes}:".encode())
        into.update(content)

    def each(items: Sequence[Any]) -> None:
        put(f"{len(items)} items")
        for item in items:
            _feed(into, item, depth + 1)

    if depth > MAX_DEPTH:
        raise TypeError(f"{kind.__name__} at depth {depth}")
    if value is None or kind in _PLAIN or kind is datetime.datetime:
        put(kind.__name__, str(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray | memoryview):
        put("bytes", value)
    elif isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        put(f"{value.dtype} {tuple(value.shape)}", plain.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSUMm":
        put(f"{value.dtype.str} {value.shape}", np.asarray(value).tobytes())
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        each(value.tolist())
    elif isinstance(value, enum.Enum):
        put(kind.__name__, value.name.encode())
    elif isinstance(value, Mapping | Set):
        pairs = value.items() if isinstance(value, Mapping) else ((item, None) for item in value)
        each([name for pair in sorted((digest(key), digest(item)) for key, item in pairs) for name in pair])
    elif isinstance(value, tuple | list):
        each(value)
    elif dataclasses.is_dataclass(value):
        each([(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)])
    elif kind.__module__.startswith("PIL."):
        put(f"{value.mode} {value.size}", value.tobytes())
    else:
        raise TypeError(kind.__name__)


def seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def read_twice(read: Callable[[], Any]) -> str:
    """Return the digest of what ``read`` returns, or `RANDOM` or `UNKNOWN`. Blocks while it is read twice."""
    found = []
    try:
        for _ in range(2):
            seed_generators(stream(0, "facts"))
            found.append(digest(read()))
    except Exception:  # where the loop asks for it, it is raised again
        return UNKNOWN
    return found[0] if found[0] == found[1] else RANDOM


def first_samples(length: int) -> list[int]:
    """Return the samples that are read first: both ends of the dataset, and some between."""
    ends = list(range(length))[:: max(1, length - 1)][:2]
    return [*ends, *islice((at for at in Permutation(length, 0, 0) if at not in ends), FIRST - len(ends))]


def sample_facts(
    length: int, read: Callable[[int], Any], until: float, quick_s: float = QUICK_S
) -> dict[str, str]:
    """Return the facts of the samples of a dataset. The generators are as before afterwards.

    The first samples have a fact each. Further ones, in groups that double, have one for each group, until
    ``quick_s`` is over: a small set is compared as a whole.

    Args:
        until: When to stop, by `time.monotonic`; a read is not interrupted.
    """
    first = first_samples(length)
    rest = (sample for sample in Permutation(length, 0, 0) if sample not in first)
    facts: dict[str, str] = {}
    began = time.monotonic()
    with generators_kept():
        for sample in first:
            if time.monotonic() >= until:
                return facts
            facts[f"sample {sample}"] = found = read_twice(partial(read, sample))
            if found == RANDOM:  # the others are so, too, and those before it were read alike by chance
                return dict.fromkeys(facts, RANDOM)
            if found == UNKNOWN:
                return facts
        each_s = (time.monotonic() - began) / len(first)
        number, until = FIRST, min(until, time.monotonic() + quick_s)
        while time.monotonic() + each_s * number < until and (group := list(islice(rest, number))):
            told = [read_twice(partial(read, sample)) for sample in group]
            if RANDOM in told:
                return dict.fromkeys(facts, RANDOM)
            facts[f"samples {group[0]} and {len(group) - 1} more"] = UNKNOWN if UNKNOWN in told else digest(told)
            number *= 2
    return facts


def array_facts(array: Any, until: float) -> dict[str, str]:
    """Return the facts of the bytes of an array, which may be on a disk and larger than memory.

    Up to 256 MiB all of it is hashed, else so much of it in blocks that are spread evenly.

    Args:
        until: When to stop, by `time.monotonic`.
    """
    content = array.reshape(-1).view(np.uint8)
    whole, facts = -(-len(content) // BLOCK), {"length": str(len(array))}
    for name, most in zip(("text", "text, more of it"), BLOCKS, strict=True):
        into, blocks = xxhash.xxh3_64(), min(most, whole)
        for block in range(blocks):
            at = block * BLOCK if blocks == whole else block * (len(content) - BLOCK) // (blocks - 1)
            if time.monotonic() >= until:
                return facts
            into.update(content[at : at + BLOCK].tobytes())
        facts[name] = into.hexdigest()
        if blocks == whole:
            break
    return facts
