"""`BatchStream`: batches that can only be read in order, one iterator for each data rank of each replica.

Item n of a stream is the n-th batch that its iterator gives. The committed state says which micro-batches of the
replica's data shard are trained, and so which items: micro-batch m of batch i is item i * A + m, with A
micro-batches in a batch. An item is kept until it is trained, so whatever a replica has to train again, it has. A
process that starts opens the iterator anew, with its newest saved state, and reads on to the first item that is
not trained.

The state of an iterator is saved as JSON, without pickle (`encode_state`). A list, a text, a number, a truth value
and None stand for themselves. Anything else is an object {"is": kind, "value": ...}; mappings are, too, because
their keys need not be text.
"""

from __future__ import annotations

import base64
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from ft_hsdp.errors import ConfigError
from ft_hsdp.jsonl import CLOSE_S, WAIT_S, parsed, read_regular, replace_json
from ft_hsdp.train.data.facts import sample_facts
from ft_hsdp.train.data.samples import JobShape
from ft_hsdp.train.data.step_plan import MicroBatch

Batch = TypeVar("Batch")

AGAIN = "an iterable that gives batches each time it is iterated over"
ITEMS = 2  # batches of part 0 that are compared, if any
SAVE_S = 1.0  # between two saved states of an iterator, at least


@dataclass(eq=False)
class BatchStream(Generic[Batch]):
    """Batches of an iterable; `Job.stream` makes it. It is for `Job.batches`."""

    _source: Any
    _shape: JobShape
    _run: Path
    _rank: int  # of the replica; names the file
    _batches: Callable[[Any], Iterator[Batch]]

    def __post_init__(self) -> None:
        source = self._source
        if isinstance(source, Iterator) and not hasattr(source, "load_state_dict"):
            allowed = f"{AGAIN}, or a function of (shard, shards) that returns one or makes an iterator"
            raise ConfigError("job.stream(source)", type(source).__name__, allowed)
        if not isinstance(source, Iterable) and not callable(source):
            allowed = "an iterable of batches, or a function of (shard, shards) that returns one"
            raise ConfigError("job.stream(source)", type(source).__name__, allowed)

    def batch(self, shard: int, index: int, rank: int, micro: int = 0) -> Batch:
        raise ConfigError("stream.batch", (shard, index, rank, micro), "no call: a stream is read in order")

    def facts(self, until: float) -> dict[str, str]:
        """Return the digests of the first batches of part 0, which every rank can read.

        A stream that is read in order may come from far away: nothing is read unless `data.check` is true. An
        iterable that is this rank's own part is not read, since it would go on behind what was read.
        """
        if isinstance(self._source, Iterable):
            return {}
        shards = self._shape.shards * self._shape.ranks
        return sample_facts(1, lambda _: list(islice(self._source(0, shards), ITEMS)), until)

    def reader(self, rank: int) -> StreamReader[Batch]:
        return StreamReader(self._source, self._shape, rank, self._run, self._rank)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches(self)


@dataclass(eq=False)
class StreamReader(Generic[Batch]):
    """Reads the stream of one data rank, on the main thread, and keeps what is not trained yet.

    It opens nothing before the first batch is asked for: which replica this is may not be known.
    """

    _source: Any
    _shape: JobShape
    _rank: int
    _run: Path
    _file: int  # number in the name of the file with the state
    _shard: int = -1  # of the data; -1: nothing was asked for yet
    _opened: Any = None  # the iterable
    _iterator: Iterator[Any] | None = None
    _next: int = 0  # number of the item that the iterator gives next
    _epoch: int = 0  # how often the iterator has ended
    _first: int = 0  # number of the first item that is not trained
    _kept: dict[int, Any] = field(default_factory=dict)  # items from that one on
    _state: tuple[int, int, Any] | None = None  # (next item, epoch, encoded state of the iterable)
    _saved_at: float = 0.0
    _writer: threading.Thread | None = None  # of the newest saved state: no step waits for a disk

    def guess(self, ahead: Iterable[MicroBatch]) -> None:
        """Read the first of ``ahead``; blocks while it, and what comes before it, is read."""
        at = next(iter(ahead))
        self._first = self._item(at)
        self.batch(at, ())

    def batch(self, at: MicroBatch, ahead: Iterable[MicroBatch]) -> Batch:
        number = self._item(at)
        if number not in self._kept:
            self._seek(at, number)
            self._read()
        return self._kept[number]

    def trained(self, first: MicroBatch) -> None:
        """Forget the items before ``first``, and save the state of the iterable from time to time."""
        self._first = number = self._item(first)
        self._kept = {n: item for n, item in self._kept.items() if n >= number}
        busy = self._writer is not None and self._writer.is_alive()
        if self._state is not None and self._state[0] <= number and not busy:
            self._writer = threading.Thread(target=self._save, args=(self._path, self._state), daemon=True)
            self._writer.start()
            self._writer.join(WAIT_S)
            self._state = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.join(CLOSE_S)
        self._iterator = self._opened = None

    @property
    def _number(self) -> int:
        return self._shard * self._shape.ranks + self._rank

    def _item(self, at: MicroBatch) -> int:
        return at.index * self._shape.accumulate + at.micro

    def _seek(self, at: MicroBatch, number: int) -> None:
        """Bring the iterator to an item: from where it is, from its saved state, or else from its beginning."""
        if at.shard != self._shard:
            self._shard, self._iterator, self._kept = at.shard, None, {}
        here = self._next if self._iterator is not None and self._next <= number else -1
        if here == number:
            return
        saved = self._saved()
        if saved is not None and here < saved[0] <= number:
            self._open(*saved)
        elif here < 0:
            self._open(0, 0, None)
        while self._next < number:
            self._read()

    def _open(self, number: int, epoch: int, state: Any) -> None:
        """Open the iterable where ``number`` items were read, which its ``state`` says; None: at its beginning."""
        shape = self._shape
        made = self._source
        if not isinstance(made, Iterable):
            made = made(self._number, shape.shards * shape.ranks)
        if not isinstance(made, Iterable):
            allowed = "a function of (shard, shards) that returns an iterable of batches"
            raise ConfigError("job.stream(source)", type(made).__name__, allowed)
        if state is not None:
            made.load_state_dict(state)  # type: ignore[attr-defined]
        self._opened, self._next, self._epoch, self._state = made, number, epoch, None
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        if callable(set_epoch := getattr(self._opened, "set_epoch", None)):
            set_epoch(self._epoch)
        self._iterator = iter(self._opened)

    def _read(self) -> None:
        assert self._iterator is not None
        for again in range(3):
            try:
                item = next(self._iterator)
            except StopIteration:
                self._epoch += 1
                if again == 1 and not isinstance(self._source, Iterable):  # an iterator that can be used once
                    self._open(self._next, self._epoch, None)
                else:
                    self._begin_epoch()
                continue
            if self._next >= self._first:
                self._kept[self._next] = item
            self._next += 1
            self._note_state()
            return
        empty = "" if self._next else " without a batch"
        of = self._shape.shards * self._shape.ranks
        part = f"{type(self._opened).__name__}{empty} for shard {self._number} of {of}"
        raise ConfigError("job.stream(source)", part, AGAIN)

    # The saved state.

    def _note_state(self) -> None:
        """Ask the iterable for its state, if it has one and it is time for that."""
        now = time.monotonic()
        if now - self._saved_at >= SAVE_S and self._state is None and hasattr(self._opened, "load_state_dict"):
            self._saved_at = now
            try:  # now: an iterable may return the mapping that it goes on to change
                self._state = self._next, self._epoch, encode_state(self._opened.state_dict())
            except TypeError as error:
                raise ConfigError("job.stream: state_dict()", str(error), STATE_ALLOWED) from None

    @property
    def _path(self) -> Path:
        return self._run / "replicas" / str(self._shard) / f"stream-{self._file}.json"

    @property
    def _layout(self) -> list[int]:
        return [self._shape.shards, self._shape.ranks, self._shape.accumulate]

    def _save(self, path: Path, state: tuple[int, int, Any]) -> None:
        number, epoch, encoded = state
        body = {"layout": self._layout, "items": number, "epoch": epoch, "state": encoded}
        try:
            replace_json(path, body)
        except OSError:
            return  # the next one may be written; until then a new process reads more items again

    def _saved(self) -> tuple[int, int, Any] | None:
        try:
            body = parsed(read_regular(self._path))
            if body["layout"] != self._layout:
                return None
            return int(body["items"]), int(body["epoch"]), decode_state(body["state"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


STATE_ALLOWED = "numbers, text, bytes, tensors, numpy arrays, and lists, tuples and mappings of them"


def encode_state(value: Any) -> Any:
    """Return ``value`` as what JSON can express.

    Raises:
        TypeError: Something in it is of another type, which the message names.
    """
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and type(value) is int):
        return value
    if isinstance(value, float) and type(value) is float:
        return value if math.isfinite(value) else {"is": "float", "value": repr(value)}
    if type(value) is list:
        return [encode_state(item) for item in value]
    if isinstance(value, Mapping):
        return {"is": "mapping", "value": [[encode_state(key), encode_state(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"is": "tuple", "value": [encode_state(item) for item in value]}
    if isinstance(value, bytes):
        return {"is": "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return {"is": "tensor", "value": encode_state(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {"is": kind, "value": [value.dtype.str, list(value.shape), data]}
    raise TypeError(type(value).__name__)


def decode_state(value: Any) -> Any:
    """Return what `encode_state` was given.

    Raises:
        ValueError: `encode_state` has not made it.
    """
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        kind, inner = value["is"], value["value"]
        match kind:
            case "float":
                return float(inner)
            case "mapping":
                return {decode_state(key): decode_state(item) for key, item in inner}
            case "tuple":
                return tuple(decode_state(item) for item in inner)
            case "bytes":
                return base64.b64decode(inner, validate=True)
            case "tensor":
                return torch.from_numpy(decode_state(inner))
            case "array" | "scalar":
                dtype, shape, data = inner
                array = np.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()
                return array if kind == "array" else array[()]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no state: {error!r}") from None
    raise ValueError(f"no state: {kind!r}")
