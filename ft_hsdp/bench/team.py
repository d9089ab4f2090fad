"""The workers of one contender, as one thing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ft_hsdp.bench.link import Answer, Link, ask, collect
from ft_hsdp.errors import DataCorruption, Retryable

LEAD_S = 0.005  # from the command to the common start: every worker has read it by then


class Team:
    """A contender's ring. `links[i]` is member i; `order` is the ring, clockwise."""

    def __init__(self, name: str, links: Sequence[Link]) -> None:
        self.name = name
        self.links: list[Link] = []
        self.order: list[int] = []
        self._epoch = 0
        for link in links:
            self.add(link)

    def add(self, link: Link) -> None:
        """One more member, at the end of the ring; `join` makes it one."""
        self.order.append(len(self.links))
        self.links.append(link)

    @property
    def active(self) -> list[Link]:
        """The members of the ring, clockwise."""
        return [self.links[member] for member in self.order]

    def join(self, order: Sequence[int] | None = None) -> float:
        """Form a ring of these members under a new epoch; seconds from a common start until all are ready."""
        self.order = list(self.order if order is None else order)
        start = time.monotonic() + LEAD_S
        return self.last(ask(self.active, {**self.membership("join"), "at": start})) - start

    def membership(self, what: str) -> dict[str, Any]:
        """The command to join the ring of `order` under a new epoch."""
        self._epoch += 1
        ring = [(member, self.links[member].address) for member in self.order]
        return {"do": what, "epoch": self._epoch, "ring": ring}

    def prepare(self, size: int) -> None:
        """Allocate for `size` bytes."""
        ask(self.active, {"do": "prepare", "bytes": size})

    def check(self) -> None:
        """Sum known values. Raises DataCorruption if a sum is wrong."""
        for link, answer in zip(self.active, ask(self.active, {"do": "check"}), strict=True):
            if wrong := answer.get("wrong"):
                raise DataCorruption(f"bench: {link.name} has a wrong sum: {wrong}")
            _complete(link, answer)

    def start(self, times: int = 1) -> float:
        """Begin `times` all-reduces, one after the other; the common start."""
        start = time.monotonic() + LEAD_S
        for link in self.active:
            link.send({"do": "run", "times": times, "at": start})
        return start

    def time(self, times: int = 1) -> float:
        """Seconds of an all-reduce: from a common start to the slowest rank's end, over `times`."""
        start = self.start(times)
        return (self.last(collect(self.active)) - start) / times

    def spin(self, on: bool) -> None:
        """Start or stop a thread of pure Python in the first member's process."""
        ask(self.links[:1], {"do": "spin", "on": on})

    def close(self) -> None:
        """Kill what is left."""
        for link in self.links:
            link.close()

    def last(self, answers: Sequence[Answer]) -> float:
        """The moment when the last of the ring's members was done. Raises Retryable if one has failed."""
        for link, answer in zip(self.active, answers, strict=True):
            _complete(link, answer)
        return max(float(answer["t"]) for answer in answers)


def _complete(link: Link, answer: Answer) -> None:
    """Raises Retryable where an all-reduce failed that nobody disturbed."""
    if "raised" in answer:
        raise Retryable(f"bench: {link.name} raised {answer['raised']}: {answer['text']}")
