"""What one rank trains in a step: its micro-batches, their weights, and the contributions that they become."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsFloat

from ft_hsdp.core.commit import MAX_PARTS, MAX_RUNS, MAX_WEIGHT, Contribution
from ft_hsdp.core.ledger import Ledger, Run
from ft_hsdp.core.units import Places, head
from ft_hsdp.errors import ConfigError

MAX_MICRO_BATCHES = 65536  # of a rank in one step, whatever a grant says


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one data rank trains at once: a unit, which is micro-batch ``micro`` of data rank ``rank`` of a batch.

    With all its ranks a replica trains the units of one micro-batch of a batch together, each on the data rank
    after which it is named. With fewer ranks a unit may be trained on another one.
    """

    shard: int
    index: int  # of the batch in the data shard
    micro: int
    unit: int  # its number in the data shard
    rank: int = 0  # to whose part of the batch it belongs
    # (first, count) of the units that all data ranks of the replica train at once, in the order of the ranks.
    units: Places = field(default=(), compare=False)


def checked_weight(weight: object) -> int:
    """Return the weight that a training loop gave a micro-batch."""
    try:
        number = -1 if isinstance(weight, bool) else operator.index(weight)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_WEIGHT:
        raise ConfigError("job.weigh", weight, f"an integer from 0 to {MAX_WEIGHT}")
    return number


@dataclass(slots=True)
class TrainedMicroBatch:
    at: MicroBatch
    part: int  # how often the step's gradients were reduced inside the replica before (`Contribution.part`)
    weight: int | None = 1  # of this rank's unit; None: it is not known yet
    loss: SupportsFloat = math.nan  # a tensor in host memory may be on its way (`train.device.told`)
    scaled: bool = False  # whether a gradient was multiplied by the weight, which is fixed from then on

    def weigh(self, weight: int) -> None:
        """Set the weight of this rank's unit."""
        if self.scaled and weight != self.weight:
            raise ConfigError("job.weigh", weight, f"{self.weight}, by which a gradient was multiplied already")
        self.weight = weight

    def scale(self) -> int:
        """Return the weight, by which a gradient is multiplied now."""
        weight = self.known()
        self.scaled = True
        return weight

    def known(self) -> int:
        """Return the weight, which has to be known: else a ConfigError."""
        if self.weight is None:
            allowed = f"an integer from 0 to {MAX_WEIGHT}, before each backward: data.weight is tokens"
            raise ConfigError("job.weigh", None, allowed)
        return self.weight


@dataclass(eq=False)
class StepPlan:
    """The micro-batches of one rank in one step: what is trained already, and what is still to be trained.

    The orders of the leader say which places are the replica's; `target` may grow while the step is open.
    """

    _ledger: Ledger
    _shard: int
    _data_ranks: int
    _accumulate: int
    _places: Places = ()  # of the replica, among the untrained units of the data shard
    weighs: bool = False  # `TrainedMicroBatch.weigh` says what each micro-batch weighs; else it is 1
    data_rank: int = 0
    of_batch: int = 0  # data ranks of a batch: those of a replica with all its ranks; 0: as many as this one has
    _part: int = 0
    _due: tuple[Places, int] = ((), 0)  # places, and how many units of them can be trained
    ordered: bool = False  # whether an order has confirmed, changed or ended what is to be trained
    trained: list[TrainedMicroBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.of_batch = self.of_batch or self._data_ranks
        self._each = self._accumulate * self.of_batch
        self._target = self._micro_batches(self._places)

    def at(self, place: int) -> MicroBatch:
        return self._cut(self._ledger.at(self._shard, ((place, self._data_ranks),)))[0]

    @property
    def left(self) -> Sequence[MicroBatch]:
        return self._target[len(self.trained) :]

    def begin(self) -> MicroBatch:
        """Count the first micro-batch of `left` as trained, and return it."""
        at = self.left[0]
        self.trained.append(TrainedMicroBatch(at, self._part, None if self.weighs else 1))
        return at

    def trainable(self, places: Places) -> int:
        """Return how many units of ``places`` can be trained in one step: no more than `MAX_RUNS` runs.

        From any thread.
        """
        known, units = self._due
        if known != places:
            units = len(self._micro_batches(places)) * self._data_ranks
            self._due = places, units
        last = self._part == MAX_PARTS - 1  # what it has to train can grow no more
        return min(units, len(self._target) * self._data_ranks) if last else units

    def extend(self, places: Places) -> bool:
        """Plan to train ``places`` instead; what is trained already stays. Return whether anything is left then.

        If nothing was left before, the step's gradients have been reduced inside the replica: a new part begins,
        unless there are `MAX_PARTS` of them. Else at least one micro-batch is left: its backward is the one that
        reduces what is trained.
        """
        self.ordered = True
        target, done = self._micro_batches(places), len(self.trained)
        if self.left:
            self._target = target if len(target) > done else self._target[: done + 1]
        elif len(target) > done and self._part < MAX_PARTS - 1:
            self._target = target
            self._part += 1
        return bool(self.left)

    def close(self, more: int = 0) -> None:
        """Train ``more`` micro-batches at most, then nothing more in this step."""
        self.ordered = True
        self._target = self._target[: len(self.trained) + more]

    def contributions(self, replica: int) -> tuple[Contribution, ...]:
        """Return what is trained as contributions of ``replica``, with this rank's weights, and without a loss."""
        weights = [t.known() for t in self.trained]
        for t, weight in zip(self.trained, weights, strict=True):
            if self.weighs and weight and not t.scaled:
                allowed = "0, or a loss made of what the model's forward returned, and its backward"
                raise ConfigError("job.weigh", weight, allowed)
        runs: list[Contribution] = []
        for t, weight in zip(self.trained, weights, strict=True):
            for first, count in t.at.units:
                mine = weight if first <= t.at.unit < first + count else 0
                before = runs[-1] if runs else None
                if before is not None and (sum(before.run[1:]), before.part) == (first, t.part):
                    runs[-1] = replace(before, units=before.units + count, weight=before.weight + mine)
                else:
                    runs.append(Contribution(replica, mine, t.at.shard, first, 0.0, count, t.part))
        return tuple(runs)

    def loss(self) -> Callable[[], float]:
        """Return what returns the mean loss of all that is trained now, once the device has told it."""
        known = [(t.weight, t.loss) for t in self.trained if t.weight]
        total = sum(weight for weight, _ in known)
        return lambda: sum(weight * float(loss) for weight, loss in known) / total if total else 0.0

    def _micro_batches(self, places: Places) -> list[MicroBatch]:
        places = head(places, MAX_MICRO_BATCHES * self._data_ranks)
        return self._cut(self._ledger.at(self._shard, places)[:MAX_RUNS])

    def _cut(self, runs: Sequence[Run]) -> list[MicroBatch]:
        """Return the micro-batches of this rank in runs of units; units that are too few for one are left out."""
        found: list[MicroBatch] = []
        units: list[tuple[int, int]] = []
        missing = self._data_ranks
        for _, first, count in runs:
            end = first + count
            while first < end:
                taken = min(end - first, missing)
                units.append((first, taken))
                first, missing = first + taken, missing - taken
                if not missing:
                    found.append(self._micro_batch(tuple(units)))
                    units, missing = [], self._data_ranks
        return found

    def _micro_batch(self, units: Places) -> MicroBatch:
        before = self.data_rank
        for first, count in units:
            if before < count:
                index, within = divmod(first + before, self._each)
                micro, rank = divmod(within, self.of_batch)
                return MicroBatch(self._shard, index, micro, first + before, rank, units)
            before -= count
        raise ValueError(f"{units} are no units of {self._data_ranks} data ranks")
