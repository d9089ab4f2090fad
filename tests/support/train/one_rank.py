"""The parts of a rank, wired as `Job` wires them, in a replica of one rank without connections to others."""

from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import Config
from ft_hsdp.core.commit import CommitRecord, Contribution
from ft_hsdp.core.effects import RunBatch
from ft_hsdp.core.ledger import Ledger
from ft_hsdp.core.state_id import StateId
from ft_hsdp.train.fsdp.adopted_model import AdoptedModel
from ft_hsdp.train.fsdp.adopted_model import shard as shard_parts
from ft_hsdp.train.loop.callbacks import Callbacks
from ft_hsdp.train.optimizer.committing import Optimizer
from ft_hsdp.train.optimizer.creation import create_state
from ft_hsdp.train.optimizer.groups import Groups
from ft_hsdp.train.orders import ApplyOrder, Mailbox, Order
from ft_hsdp.train.state.live_state import LiveState
from ft_hsdp.train.step_driver import Joined, StepDriver
from tests.support.state.odd_model import Odd

START = StateId(0, 0, "0" * 32)
STEP = 4


class Waits(Exception):
    """Nothing is in the mailbox: the main thread would wait."""


class Orders(Mailbox):
    """A mailbox that says so instead of waiting."""

    def get(self) -> Order:
        if not self._orders:
            raise Waits
        return super().get()


class OneRank:
    """A rank that has joined as ``replica``, at step 0."""

    def __init__(self, mesh: DeviceMesh, config: Config, replica: int = 0) -> None:
        self.model = Odd()
        shard_parts(self.model, list(self.model.parts), mesh)
        self.adopted = AdoptedModel(self.model, 1, lambda bucket, flat: self.driver.ready(bucket, flat))
        self.params = self.adopted.params
        self.sgd = torch.optim.SGD(self.params.values(), lr=0.25)
        create_state(self.sgd)
        groups = Groups(self.sgd)
        self.live = LiveState(self.adopted, groups, Ledger.empty(config.data_shards), 0, 1)
        self.live.state = START
        self.orders, self.callbacks = Orders(), Callbacks()
        device = torch.device("cpu")
        self.driver = StepDriver(
            config, 0, 1, device, self.adopted, groups, self.live, self.orders, self.callbacks
        )
        self.model.register_forward_hook(self.driver.returned)
        self.driver.replica = replica
        self.optim = Optimizer(self.driver)
        self.runtime, self.saver = mock.Mock(snapshot_s=0.0), mock.Mock()
        self.joined = Joined(self.runtime, self.saver, None, False)
        self.driver.begin(self.joined)
        self.source: Any = mock.Mock()
        self.source.batch.return_value = torch.zeros(1)
        self.batches = iter(())

    def feed(self, *places: tuple[int, int]) -> None:
        self.batches = self.driver.feed(self.source, RunBatch(STEP, places, 0))

    def micro_batch(self) -> bool:
        return next(self.batches, None) is not None

    def gradients(self) -> dict[str, torch.Tensor]:
        grads: dict[str, Any] = {name: p.grad for name, p in self.params.items()}
        return {name: grad.full_tensor() for name, grad in grads.items()}

    def record(self, loss: float = 2.0) -> CommitRecord:
        """The commit of the step after the live state, of replicas 0 and 1."""
        state = self.live.state
        assert state is not None
        rows = tuple(Contribution(r, 1, r, self.live.ledger.cursors[r], loss + r) for r in (0, 1))
        return CommitRecord(1, 0, state.step + 1, state.lineage, (0, 1), 2, rows, "d", norm=0.5, wanted=2)

    def commit(self) -> None:
        reduced = [torch.ones(n) for n in self.adopted.sizes]
        self.driver.carry_out(ApplyOrder(self.record(), reduced))
