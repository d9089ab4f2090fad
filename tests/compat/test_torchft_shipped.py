"""torchft's own tests of process groups and of its Manager, from its wheel, with ours in gloo's place."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchft import Manager, manager_integ_test, process_group_test
from torchft.checkpointing import pg_transport_test

from ft_hsdp.compat.torchft import ProcessGroupFTAR

# torchft's own: its logger where torch has no flight recorder of NCCL, its walk over checkpoints.
pytestmark = [
    pytest.mark.multiproc,  # the names of the shipped tests differ from process to process
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]
made: list[ProcessGroupFTAR] = []


class Tracked(ProcessGroupFTAR):
    """The shipped tests drop their groups without a word."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        made.append(self)


class Seeded(manager_integ_test.MyModel):  # type: ignore[misc]
    """The same weights in all threads: the shipped ones come from torch's own generator, which all of them use."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(42)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.5, 0.5, generator)


def any_port(**kwargs: Any) -> Manager:
    """The shipped tests ask for fixed ports, which another run on this machine may have."""
    return Manager(**{**kwargs, "port": 0})


@pytest.fixture(autouse=True)
def _ours() -> Iterator[None]:
    with (
        patch.object(process_group_test, "ProcessGroupGloo", Tracked),
        patch.object(pg_transport_test, "ProcessGroupGloo", Tracked),
        patch.object(manager_integ_test, "ProcessGroupGloo", Tracked),
        patch.object(manager_integ_test, "Manager", any_port),
        patch.object(manager_integ_test, "MyModel", Seeded),
    ):
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _shut_down() -> Iterator[None]:
    yield
    assert made, "the shipped tests did not use ours"
    for group in made:
        group.shutdown()
    made.clear()


class TestProcessGroup(process_group_test.ProcessGroupTest):
    """Those that are about ProcessGroupGloo; the others are about torchft's other groups."""

    test_baby_gloo_apis = test_baby_gloo_timeout = test_reconfigure_baby_process_group = None
    test_baby_nccl_apis = test_nccl_apis = test_nccl_timeouts = test_nccl_init_timeout = None
    test_dummy = test_process_group_wrapper = test_managed_process_group = None
    test_error_swallowing_process_group_wrapper = None


class TestThreeRanks(process_group_test.NormalGlooMultiPgTest):
    """All collectives at three ranks, each also with a rank that is lost."""

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroupFTAR:
        return Tracked(timeout=timedelta(seconds=30))

    def test_collective_left_out_by_torchft(self) -> None:
        self._run_parallel("alltoall_base")
        self._run_parallel("reduce_scatter")


class TestManager(manager_integ_test.ManagerIntegTest):
    """Two replicas of the Manager as threads, of which one fails and comes back."""

    test_quorum_timeout = None  # asserts a time, and needs no process group
    test_ddp_healthy_torchcomms = test_ddp_recovery_torchcomms = None


class TestTransport(pg_transport_test.PGTransportTest):
    """Checkpoints by send and recv."""

    test_pg_transport_baby_nccl = test_pg_transport_baby_nccl_inplace = None
