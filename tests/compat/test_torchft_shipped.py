"""torchft's own tests of process groups, its Manager, LocalSGD and DiLoCo, with our process group in gloo's place.

They are those of the wheel that is installed: 0.2.0, or the nightly in the environment of
`make torchft-nightly`. Where the two differ, this module asks for what is there.
"""

import gc
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module, util
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torchft import (
    Manager,
    diloco_regression_test,
    local_sgd_integ_test,
    local_sgd_test,
    manager_integ_test,
    process_group_test,
)
from torchft._test import diloco_trainer
from torchft.checkpointing import pg_transport_test
from torchft.coordination import LighthouseServer

from ft_hsdp.compat.torchft import ProcessGroupFTAR

# torchft's own: its logger where torch has no flight recorder of NCCL, its walk over checkpoints and how it reads
# them, the sockets of its transport, a test that asks for the gradient of a result.
pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
]
made: list[ProcessGroupFTAR] = []


class Tracked(ProcessGroupFTAR):
    """The shipped tests drop their groups without a word."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout, host="127.0.0.1")
        made.append(self)


class Seeded(manager_integ_test.MyModel):  # type: ignore[misc]
    """The same weights in all threads: the shipped ones come from torch's own generator, which all of them use."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        generator = torch.Generator().manual_seed(42)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.5, 0.5, generator)


def any_port(**kwargs: Any) -> Manager:
    """The shipped tests ask for fixed ports, which another run on this machine may have."""
    return Manager(**{**kwargs, "port": 0})


def patient_lighthouse(**kwargs: Any) -> LighthouseServer:
    """By default it goes on after 0.1 s without a replica that is slow, and the test ends without it."""
    return LighthouseServer(**{"join_timeout_ms": 1000, **kwargs})


def with_a_rank_that_never_comes(group: ProcessGroupFTAR) -> None:
    """The nightly's test names it by a handle of gloo's, which ours refuses before it waits for anybody."""
    mine = group.get_reconfigure_handle()
    theirs = json.dumps({**json.loads(mine), "id": "0" * 32})
    options = process_group_test.ReconfigureOptions()
    options.uuid, options.handles = 1, [mine, theirs]
    group.reconfigure(options).wait()


NEW = "torchft.reconfigure_test"  # the nightly has it
reconfigure_test: Any = import_module(NEW) if util.find_spec(NEW) else None

GROUPS = (process_group_test, pg_transport_test, manager_integ_test, local_sgd_integ_test, diloco_trainer)
OURS: list[tuple[Any, str, Any]] = [
    *((module, "ProcessGroupGloo", Tracked) for module in (*GROUPS, reconfigure_test)),
    *((module, "Manager", any_port) for module in (manager_integ_test, local_sgd_integ_test, diloco_trainer)),
    *((module, "MyModel", Seeded) for module in (manager_integ_test, local_sgd_integ_test)),
    *(
        (module, "LighthouseServer", patient_lighthouse)
        for module in (local_sgd_integ_test, diloco_regression_test)
    ),
    # The wheel has no fixtures; then the tests compute what is right.
    (diloco_regression_test, "handle_fixture", lambda *_: None),
    (process_group_test, "_reconfigure_with_missing_peer", with_a_rank_that_never_comes),
]
MOCKED = {"TestLocalSGD", "TestDiLoCo"}  # their Manager is a mock: no group takes part


@pytest.fixture(autouse=True)
def _ours(request: pytest.FixtureRequest) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, ours in OURS:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, ours))
        yield
    assert made or request.cls.__name__ in MOCKED, "the shipped tests did not use ours"
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def _shut_down() -> Iterator[None]:
    yield
    for group in made:
        group.shutdown()
    made.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # or a later test would be told of the sockets


class TestProcessGroup(process_group_test.ProcessGroupTest):
    """Those that are about ProcessGroupGloo; the others are about torchft's other groups."""

    test_baby_gloo_apis = test_baby_gloo_timeout = test_reconfigure_baby_process_group = None
    test_baby_nccl_apis = test_nccl_apis = test_nccl_timeouts = test_nccl_init_timeout = None
    test_dummy = test_process_group_wrapper = test_managed_process_group = None
    test_error_swallowing_process_group_wrapper = None


def without_numbers(tests: type) -> type:
    """The shipped tests are numbered in the order of a set, but all workers must collect the same names."""
    for name in dir(tests):
        if numbered := re.fullmatch(r"(test_collective\w*?)_\d+_(\w+)", name):
            setattr(tests, f"{numbered[1]}_{numbered[2]}", getattr(tests, name))
            setattr(tests, name, None)
    return tests


@without_numbers
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
    test_pg_transport_baby_nccl = test_pg_transport_baby_nccl_inplace = None


class TestLocalSGD(local_sgd_test.LocalSGDTest):
    """When LocalSGD asks for a quorum and reduces."""


class TestDiLoCo(local_sgd_test.DiLoCoTest):
    """What DiLoCo reduces, and how it applies it."""


QUICK = {"test_local_sgd_recovery_0", "test_streaming_diloco_commit_failure_11", "test_diloco_mocked_updates_4"}


for case in (local_sgd_integ_test.LocalSGDIntegTest, diloco_regression_test.DiLoCoMockedUpdateTest):
    for name in {name for name in dir(case) if name.startswith("test")} - QUICK:
        pytest.mark.proof(getattr(case, name))
del case  # or pytest collects it once more


class TestLocalSGDOfTwoReplicas(local_sgd_integ_test.LocalSGDIntegTest):
    """LocalSGD and streaming DiLoCo: a replica fails, an all-reduce fails."""


# A third replica that comes has the milliseconds of two steps to ask for a quorum; later, the others have ended.
for late in [name for name in dir(TestLocalSGDOfTwoReplicas) if "upscale" in name]:
    setattr(TestLocalSGDOfTwoReplicas, late, None)


class TestDiLoCoRegression(diloco_regression_test.DiLoCoMockedUpdateTest):
    """The weights of DiLoCo after each step, with and without a replica that fails."""


if reconfigure_test is not None:

    class TestReconfigure(reconfigure_test.ReconfigureTest):  # type: ignore[misc]
        """Handles and the exchange of them; its native groups are torch's own."""
