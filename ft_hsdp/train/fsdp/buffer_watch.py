"""Finds what training changes although no committed state has it: buffers and frozen parameters nobody declared.

A digest of each block of 64 KiB is kept, because `Tensor._version` does not count writes through ``.data``, the
usual form of a moving average. A look at all compares every buffer, up to a limit, and the first block of each
frozen parameter, which an average changes everywhere. `look_on` compares two blocks, so it costs a step nothing
that can be measured, and comes round to all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash

from ft_hsdp.errors import ConfigError
from ft_hsdp.train.fsdp.moving_buffers import Place
from ft_hsdp.train.state.packing import as_bytes

BLOCK = 64 << 10  # bytes that have a digest of their own
NAMED = 4  # tensors that a message names
MOST = 64 << 20  # bytes of buffers that a look at all compares, beside the first block of each tensor


class BufferWatch:
    """The tensors that training must leave alone, with the digests of what they were."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._all = tuple(places)
        self._places = list(places)  # that were not found to change
        self._known: dict[tuple[str, int], int] = {}
        self._turns: list[Iterator[tuple[Place, int] | None]] = []

    def begin(self) -> None:
        self._places = list(self._all)
        self._known.clear()
        kinds: tuple[Callable[[Place], bool], ...] = (lambda p: p.kind == "frozen", lambda p: p.kind != "frozen")
        self._turns = [self._round(of_kind) for of_kind in kinds]
        self.look()

    def look(self) -> list[Place]:
        """Compare all buffers, and a part of each frozen parameter; return which differ, each once."""
        left, found = MOST, []
        for place in list(self._places):
            for block in range(_blocks(place) if place.kind != "frozen" and left > 0 else 1):
                left -= BLOCK
                if self._differs(place, block):
                    found.append(place)
                    break
        return found

    def look_on(self) -> list[Place]:
        """Compare the next block of the buffers and of the frozen parameters; return which differ, each once."""
        due = [next(turn) for turn in self._turns]
        return [each[0] for each in due if each is not None and self._differs(*each)]

    def refuse(self, found: Sequence[Place]) -> None:
        """Refuse that training changes tensors; let buffers pass that are not persistent.

        Raises:
            ConfigError: One of them is persistent.
        """
        wrong = [place for place in found if place.kind != "scratch"]
        if wrong:
            others = f" and {len(wrong) - 1} more" if wrong[1:] else ""
            raise ConfigError("job.adopt", f"{wrong[0].name}{others}, which training changes", ways(*wrong))

    def _round(self, of_kind: Callable[[Place], bool]) -> Iterator[tuple[Place, int] | None]:
        while True:
            mine = [place for place in self._places if of_kind(place)]
            if not mine:
                yield None
            for place in mine:
                for block in range(_blocks(place)):
                    if place in self._places:
                        yield place, block

    def _differs(self, place: Place, block: int) -> bool:
        """Return whether a block is not what it was when it was seen first; its tensor is then watched no more."""
        now = _digest(place, block)
        if self._known.setdefault((place.name, block), now) == now:
            return False
        self._places.remove(place)
        return True


def ways(*found: Place) -> str:
    """Return how tensors that training changes are declared, in words."""
    named = ", ".join([f'"{each.name}": MODE' for each in found[:NAMED]] + ["..."] * (len(found) > NAMED))
    mean = ' or "mean"' if all(each.averages for each in found) else ""
    modes = f'"state"{mean} (the state has it), or "local" (it is of no consequence)'
    return f"job.adopt(model, buffers={{{named}}}) with {modes}"


def _blocks(place: Place) -> int:
    tensor = place.tensor
    return 1 if tensor is None else max(1, -(-tensor.numel() * tensor.element_size() // BLOCK))


def _digest(place: Place, block: int) -> int:
    """Return a digest of the form of a tensor and of one of its blocks, for this process alone."""
    tensor = place.tensor
    if tensor is None or tensor.is_meta:
        return 0
    array: Any = as_bytes(tensor)[block * BLOCK : (block + 1) * BLOCK].cpu().numpy()
    return hash((tensor.dtype, tensor.shape, xxhash.xxh3_64_intdigest(memoryview(array))))
