"""Shards of a state that is cut for another number of ranks, as a replica that recovers or fetches uses them.

All of it follows from the layout of this rank's own shard. A layout that FSDP2 has not cut by rows over all ranks
has no other widths: then only shards of the own width count, and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ft_hsdp.core.grant import Member
from ft_hsdp.memory.recovery import Holding, Width
from ft_hsdp.state.transfer import parts, reshape
from ft_hsdp.state.transfer.fetch import Donor
from ft_hsdp.state.transfer.parts import Uncuttable
from ft_hsdp.state.transfer.reshape import WantedShard
from ft_hsdp.state.transfer.shard_manifest import Layout

MAX_OTHERS = 8  # other widths that count, the largest ones


class OtherWidths:
    """The other widths of one state, worked out when a shard of them is seen.

    Args:
        layout: Of this rank's shard.
        layouts: The layout of the shard of each rank of this replica.
    """

    def __init__(self, layout: Layout, layouts: Sequence[str]) -> None:
        self._layout = layout
        self._layouts = tuple(layouts)
        self._found: dict[int, Width | None] = {}

    def of(self, holdings: Iterable[Holding]) -> Mapping[int, Width]:
        """Return the other widths that ``holdings`` have, as far as the state can be cut for them."""
        seen = {each.ranks for each in holdings if 0 < each.ranks <= parts.MAX_WIDTH} - {len(self._layouts)}
        for ranks in sorted(seen, reverse=True)[:MAX_OTHERS]:
            if ranks not in self._found:
                self._found[ranks] = self._width(ranks)
        return {ranks: width for ranks, width in self._found.items() if width is not None}

    def _width(self, ranks: int) -> Width | None:
        own = len(self._layouts)
        try:
            if self._fingerprints(own) != self._layouts:  # another rank's shard is cut in another way
                return None
            needs = tuple(reshape.sources(self._layout, ranks, rank, own) for rank in range(own))
            return Width(self._fingerprints(ranks), needs)
        except Uncuttable:
            return None

    def _fingerprints(self, ranks: int) -> tuple[str, ...]:
        tensors = self._layout.tensors
        return tuple(parts.layout_at(tensors, ranks, rank).fingerprint for rank in range(ranks))


def donors_of(members: Sequence[Member], shard: WantedShard) -> tuple[int, dict[int, list[Donor]]]:
    """Return from whom a rank fetches its shard: the width of the replicas, and who has which shard there.

    Replicas of its own width come first, then those of the width that most have.

    Args:
        members: Replicas that have the state, or will have it soon.
        shard: What is fetched.

    Raises:
        Uncuttable: Only replicas of another width have it, and the state cannot be cut for it.
    """
    widths = [len(each.state) for each in members]
    width = max(widths, key=lambda w: (w == shard.ranks, widths.count(w), w), default=shard.ranks)
    chosen = [each for each in members if len(each.state) == width]
    needed = (
        (shard.rank,) if width == shard.ranks else reshape.sources(shard.layout, width, shard.rank, shard.ranks)
    )
    return width, {rank: [Donor(each.replica, each.state[rank]) for each in chosen] for rank in needed}
