"""How often the host waits for the device in a step: to read a number from a tensor, or to load a kernel.

There is no device here, so the operations are counted that would wait for one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ft_hsdp.config import parse
from ft_hsdp.core.commit import AttemptId
from ft_hsdp.core.effects import Reduce
from ft_hsdp.ftar.connections import LaneRing
from ft_hsdp.ftar.transport.arena import Arena
from ft_hsdp.train.gradients import Reducer
from ft_hsdp.train.job import Job
from ft_hsdp.train.lanes import GradientLanes, one_lane
from tests.support.state.odd_model import batch
from tests.support.train.one_rank import STEP, OneRank, Waits

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item", "masked_select", "allclose"}


class Operations(TorchDispatchMode):
    """Counts operations: a device loads a kernel for each, and for each types of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        flat = tree_leaves((args, kwargs))
        self.seen[func.__name__, *(str(x.dtype) for x in flat if isinstance(x, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> dict[str, int]:
        """Those that wait for a device, by name."""
        return {name: count for (name, *_), count in self.seen.items() if name.partition(".")[0] in READS}


@pytest.mark.parametrize("weight", ["units", "tokens"])
@pytest.mark.parametrize("given", [False, True], ids=["returned", "given"])
def test_a_step_waits_once_for_the_device_after_backward(mesh: DeviceMesh, weight: str, given: bool) -> None:
    settings = {"replicas": 2, "ranks_per_replica": 1, "train": {"accumulate": 3}, "data": {"weight": weight}}
    one = OneRank(mesh, parse(settings))
    job: Any = SimpleNamespace(_adopted=one.adopted)
    with Operations() as warm:
        Job.warm_up(job, lambda: one.model(batch(0)).backward())
    before: list[Counter[tuple[str, ...]]] = []  # what had run when each bucket went off

    def all_reduce(*_: object) -> Future[None]:
        before.append(done.seen.copy())
        return Future()

    group = mock.Mock(arena=Arena(), transports=(), all_reduce=mock.Mock(side_effect=all_reduce))
    lanes = GradientLanes(None, one_lane(LaneRing(0, "layout"), one.adopted.sizes), 1, 0)
    one.runtime.reducer = Reducer(group, lanes, 0, 0, lambda vote: None)
    one.feed((0, 3))
    one.runtime.reducer.begin(Reduce(AttemptId(1, STEP, 0), "contribute", "ab" * 16, ((0, 3),)))
    losses = []
    with Operations() as done:
        for number in range(3):
            assert one.micro_batch()
            if weight == "tokens":
                assert one.driver.plan is not None
                one.driver.plan.trained[-1].weigh(number + 1)
            loss = one.model(batch(number))
            loss.backward()
            losses.append(loss.detach())
        assert not done.reads
        with pytest.raises(Waits):
            one.driver.end(loss if given else None)
        assert done.reads == {"equal.default": 1}, "it looks whether the gradients were changed since"
    beside = done.seen - before[0]
    assert beside
    assert not set(beside) - set(before[0]) - set(warm.seen), "loaded beside an all-reduce"
    weights = [1, 2, 3] if weight == "tokens" else [1, 1, 1]
    mean = sum(w * float(x) for w, x in zip(weights, losses, strict=True)) / sum(weights)
    entries = [call.args[3]() for call in group.all_reduce.call_args_list]
    assert len(entries) == len(one.adopted.sizes)
    assert entries[-1].contributions[0].loss == pytest.approx(mean)
    assert not any(entry.poisoned for entry in entries)
