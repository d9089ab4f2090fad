"""A loop, run again on the recorded steps of a finished run: `launcher.py replay`.

The ranks of one replica run the loop once more, with no lighthouse and no ring. `RecordedOrders` stands in for the
leader: for each recorded step it lets the loop train the units of one contributor after the other, adds their
gradients up in the order of the recorded ring, and applies the sum. Contributors of another width are trained by
other ranks, which are in a replica of that width (`replay.lanes`). `StepDriver` and the loop do the same as in a
run. So if each step leads to the recorded lineage, the sums, divisors, learning rates and data were as the records
say, through all failures.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ft_hsdp.analysis.commits import record_of
from ft_hsdp.config import Config
from ft_hsdp.core import state_id
from ft_hsdp.core.commit import CommitRecord, Contribution, over_data_ranks
from ft_hsdp.core.effects import DropGradient, Exit, Reduce, RunBatch
from ft_hsdp.core.ledger import Ledger, Run
from ft_hsdp.core.state_id import StateId
from ft_hsdp.core.units import Places
from ft_hsdp.errors import EXIT_OK, ConfigError
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.ftar.settings import Settings
from ft_hsdp.jsonl import replace_json
from ft_hsdp.state.checkpoint.writer import CheckpointNotPublished, Header
from ft_hsdp.state.replica_group import ReplicaGroup
from ft_hsdp.train.data.prefetch import Reader
from ft_hsdp.train.device import device_summaries
from ft_hsdp.train.identity import FromEnvironment, RankPlace
from ft_hsdp.train.job import Job
from ft_hsdp.train.lanes import GradientLanes, one_lane, wires
from ft_hsdp.train.orders import ApplyOrder, Mailbox, Order
from ft_hsdp.train.replay.lanes import LocalGradients, PartVote, SharedLanes
from ft_hsdp.train.state.checkpointing import checkpoints_of, load_checkpoint, open_checkpoints
from ft_hsdp.train.state.copies import CopyCost
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.step_driver import Joined, StepDriver

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recorded:
    rows: tuple[Row, ...]  # canonical commits that follow each other, of members of the same widths
    widths: tuple[int, ...]  # of these members; for each there are as many ranks
    outcome: Path
    shared: Path  # for files that ranks of different widths exchange
    loads: Path | None = None  # where the ranks before have left the state; None: it is the first one of the run
    saves: Path | None = None  # where the state is left for the ranks that follow; None: it is the last one


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What a replay found; written by rank 0."""

    digest: str  # of the state that was reached
    differs_at: int | None  # the first step with another lineage or ledger; None: none


def places_of(ledger: Ledger, runs: Sequence[Run]) -> Places:
    """Return the places of units among the untrained units of their data shard: the inverse of `Ledger.at`.

    Args:
        runs: (data shard, first unit, count), of one data shard; each lies inside a hole or behind the cursor.
    """
    found: list[tuple[int, int]] = []
    for shard, first, count in runs:
        place = 0
        for _, hole, length in (each for each in ledger.holes if each[0] == shard):
            if hole <= first < hole + length:
                place += first - hole
                break
            place += length
        else:
            place += first - ledger.cursors[shard]
        found.append((place, count))
    return tuple(found)


class RecordedOrders(Mailbox):
    """The orders of a leader, made from recorded commits; each is made when the main thread asks for it."""

    script: Script | None = None  # set before the first order

    def get(self) -> Order:
        if not self._orders:
            assert self.script is not None
            self._orders.append(next(self.script.orders))
        return self._orders.popleft()


@dataclass(eq=False)
class Script:
    """What one rank does to repeat recorded steps, and what it has found. A collective of the ranks."""

    _rows: Sequence[Row]  # canonical commits that follow each other
    _width: int  # data ranks of this replica; it trains what contributors of that width have trained
    _config: Config
    _driver: StepDriver  # its loop trains
    _live_state: LiveState
    _gradients: LocalGradients  # what the loop has trained for one contributor
    _ranks: ReplicaGroup
    _lanes: SharedLanes  # how this rank sums
    ended: bool = False
    differs_at: int | None = None

    def __post_init__(self) -> None:
        self.orders = self._run()

    def _run(self) -> Iterator[Order]:
        for row in self._rows:
            yield from self._step(row)
            if self.differs_at is not None:
                break
        self.ended = True
        yield Exit(EXIT_OK, "the recorded steps are repeated")

    def _step(self, row: Row) -> Iterator[Order]:
        """Repeat one step, or note that it cannot have been so."""
        record, ledger = record_of(row), self._live_state.ledger
        after = None
        with contextlib.suppress(ValueError):  # a unit of it was trained before
            after = record.ledger(ledger)
        runs: dict[int, list[Contribution]] = {}
        for each in record.contributions:
            runs.setdefault(each.replica, []).append(each)
        width_of = {replica: theirs[0].width or self._config.data_ranks for replica, theirs in runs.items()}
        if (
            after is None
            or (list(after.cursors), [list(h) for h in after.holes]) != (row["cursors"], row["holes"])
            or not {*width_of.values()} <= {*(record.ring_widths or width_of.values())}
        ):
            self.differs_at = record.step
            return
        if record.skipped:  # the bits of a NaN cannot be compared
            yield ApplyOrder(record, [])
            return
        mine = {r: _by_part(ledger, runs[r]) for r, width in width_of.items() if width == self._width}
        record, reduced = yield from self._sum(record, mine)
        if record.state_id.lineage != row["lineage"]:
            self.differs_at = record.step
            return
        yield ApplyOrder(record, reduced)

    def _sum(
        self, record: CommitRecord, trains: Mapping[int, Sequence[Places]]
    ) -> Generator[Order, None, tuple[CommitRecord, list[Tensor]]]:
        """Have the loop train the units of one contributor after the other, and add their gradients up.

        Args:
            record: Of the step, with the epoch, the attempt and the ring.
            trains: The places that each contributor of this width trains: after each part all that it has trained.

        Returns:
            The record with what was found now, and a flat fp32 shard of sums for each bucket.
        """
        trained: dict[int, list[Tensor]] = {}
        said: list[Contribution] = []
        for number, (replica, until) in enumerate(trains.items()):
            if number:
                yield DropGradient("the units of another contributor are next")
            self._driver.replica = replica
            yield RunBatch(record.step, until[0])
            for places in until:
                yield Reduce(record.fence, "contribute", record.prev, places)
            trained[replica], its = self._gradients.take()
            said.extend(its)
        self._lanes.give(record, trained)
        reduced, votes = self._lanes.sums(record, trained)
        return self._counted(record, said, votes), reduced

    def _counted(
        self, record: CommitRecord, mine: Sequence[Contribution], votes: Sequence[PartVote]
    ) -> CommitRecord:
        """Return ``record`` with the weights, the digest and the norm that were found now. A collective."""
        found = {
            "runs": [asdict(c) for c in mine],
            "votes": [(number, digest, square.hex()) for number, digest, square in votes],
        }
        told = [json.loads(each) for each in self._ranks.gather(json.dumps(found).encode())]
        of_data_ranks = [
            [Contribution(**c) for c in each["runs"]] for each in told[:: self._config.ranks_per_unit]
        ]
        runs = [asdict(over_data_ranks(of_ranks)) for of_ranks in zip(*of_data_ranks, strict=True)]
        runs = sorted(self._lanes.told(record, runs), key=lambda c: int(c["replica"]))
        losses = {(c.replica, c.run): c.loss for c in record.contributions}
        again = [Contribution(**c) for c in runs]
        counted = tuple(replace(c, loss=losses.get((c.replica, c.run), c.loss)) for c in again)
        parts = sorted(vote for each in told for vote in each["votes"])
        record = replace(record, contributions=counted, digest=state_id.digest([digest for _, digest, _ in parts]))
        if not record.updates:
            return record
        norm = sum(float.fromhex(square) for _, _, square in parts) ** 0.5
        return replace(record, norm=norm / (record.divisor / max(record.ring_widths, default=self._width)))


def _by_part(ledger: Ledger, runs: Sequence[Contribution]) -> list[Places]:
    """Return the places that a contributor has trained after each part of its contribution."""
    parts = sorted({c.part for c in runs})
    return [places_of(ledger, [c.run for c in runs if c.part <= part]) for part in parts]


class Silent:
    """Stands in for what a replay has no use for: the journal, the snapshots, their copies and the leader."""

    def event(self, *args: object, **facts: object) -> None:
        """Pass over an event: the run's own journal has it."""

    mark_current = request = step = event

    def cost(self) -> CopyCost:
        return CopyCost()


class ReplayRuntime(Silent):
    """Stands in for the `RankRuntime`: a replay has neither threads nor connections, and nobody watches it."""

    def __init__(self, gradients: LocalGradients) -> None:
        self.reducer = gradients
        self.journal = self.snapshots = self.copies = self.spans = Silent()

    moved = concluded = end = leave = close = Silent.event


class ReplayJob(Job):
    """A rank's part in a replay: what `ft_hsdp.join` returns to a loop that is run again."""

    def __init__(
        self,
        config: Config,
        place: RankPlace,
        device: torch.device,
        recorded: Recorded,
        close_group: Callable[[], None],
    ) -> None:
        super().__init__(config, place, FromEnvironment(0), None, device, close_group)
        self._recorded = recorded
        self._written = False
        self._group: ReplicaGroup  # made when the replay begins
        self._mailbox = self._orders = RecordedOrders()

    @property
    def replica(self) -> int:
        return self._driver.replica if self._driver is not None else 0

    def stream(self, source: Any) -> NoReturn:
        """Refuse: what was trained cannot be read again in the order in which the records have it."""
        allowed = "job.loader: each batch has to be a function of its place"
        raise ConfigError("replay", "a loop over job.stream", allowed)

    def _join(self, driver: StepDriver, reader: Reader[Any]) -> None:
        """Begin with the state on which the first recorded step builds: the initial one, or a checkpoint."""
        ranks = self._group = ReplicaGroup(self.config.timeouts.ranks_s)
        first, loads = self._recorded.rows[0], self._recorded.loads
        before = StateId(0, first["step"] - 1, first["prev"])
        self._live_state.state = before
        self._live_state.describe_frozen(ranks)
        if before.step:
            config, run = (self.config, self._place.run) if loads is None else (self._passing, loads)
            checkpoints = checkpoints_of(config, run, ranks, self._facts)
            found = load_checkpoint(self._live_state, ranks, checkpoints, before.step)
            if found is None or found.state.lineage != before.lineage:
                allowed = f"the checkpoint of step {before.step} with which the run began"
                raise ConfigError("checkpoint.dir", str(checkpoints.folder), allowed)
        self._begin(driver, Script)

    def _begin(
        self,
        driver: StepDriver,
        make: Callable[..., Script],
        evaluated: Callable[[StateId, float], object] | None = None,
    ) -> None:
        """Have the loop do what a script says, which ``make`` makes of its parts.

        Args:
            evaluated: Takes the losses of evaluations; None: nothing is evaluated.
        """
        gradients, ranks = LocalGradients(len(self._adopted.sizes)), self._group
        parts = driver, self._live_state, gradients, ranks, self._lanes()
        self._orders.script = make(self._recorded.rows, self.data_ranks, self.config, *parts)
        stand_in: Any = ReplayRuntime(gradients)
        self._runtime = stand_in
        driver.begin(Joined(stand_in, stand_in, None, False, evaluated=evaluated))

    def _lanes(self) -> SharedLanes:
        """Return how this rank sums.

        Ranks of other widths may be started later than this one, and then train a step that takes long.
        """
        recorded = self._recorded
        usual = one_lane(LaneRing(self.rank, ""), self._adopted.sizes, self._live_state.counted)
        lanes = GradientLanes(self._adopted.rows, usual, self.ranks, self.rank)
        settings, timeouts = Settings.of(self.config), self.config.timeouts
        wait_s = timeouts.start_s + timeouts.step_s
        place = recorded.widths, self.ranks, self.rank, recorded.shared
        looks = device_summaries(self.device), wires(self.config, self._adopted)
        return SharedLanes(lanes, *place, settings, wait_s, *looks)

    def leave(self) -> None:
        """Do nothing: a replay ends with its last step."""

    def _part(self) -> None:
        """Write what was found, and the state for the ranks that follow. A collective.

        Raises:
            ConfigError: The state cannot be written.
            SystemExit: Training has not ended: other ranks go on, or a step differs. What the script does after
                its loop is not for the state that is held.
        """
        script = self._orders.script
        ended = script is not None and script.ended and not self._written
        if script is not None and ended:
            self._written = True
            self._tell(script)
        super()._part()
        if ended and not self.over:
            raise SystemExit(EXIT_OK)

    def _tell(self, script: Script) -> None:
        outcome = ReplayOutcome(self._live_state.digest(), script.differs_at)
        if self._recorded.saves is not None and outcome.differs_at is None:
            self._save(self._recorded.saves)
        if self.rank == 0:
            replace_json(self._recorded.outcome, asdict(outcome))

    @property
    def _passing(self) -> Config:
        """The configuration with which ranks pass a state on: as a checkpoint in a folder of the replay."""
        checkpoint = self.config.checkpoint.model_copy(update={"dir": None, "keep": 1})
        return self.config.model_copy(update={"checkpoint": checkpoint})

    def _save(self, folder: Path) -> None:
        """Write the state as a checkpoint, which ranks of any number can load. A collective. Blocks.

        It waits for at most `timeouts.load_s`.
        """
        live_state = self._live_state
        assert live_state.state is not None
        _, checkpointer = open_checkpoints(self._passing, folder, "replay", live_state, self._group, self._facts)
        packed = np.empty(live_state.layout.nbytes, dtype=np.uint8)
        manifest = live_state.pack(live_state.state, packed)
        assert manifest is not None
        header = Header(manifest.state, manifest.ledger, manifest.hyper, manifest.user)
        written = checkpointer.write(torch.from_numpy(packed), header)
        checkpointer.close(self.config.timeouts.load_s)
        outcome = written.result()
        if isinstance(outcome, CheckpointNotPublished):
            allowed = f"one that can be written to {folder} ({outcome.reason})"
            raise ConfigError("replay", f"the state of step {live_state.state.step}", allowed)
