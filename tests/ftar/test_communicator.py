import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from ft_hsdp.errors import ConnectFailed, FTARError, InvalidArgument, RecoverableError, StaleEpoch
from ft_hsdp.ftar import Communicator, Settings
from ft_hsdp.ftar.allreduce import DTYPES
from ft_hsdp.ftar.lane import GroupState
from tests.support.ftar.ring_helpers import TOKEN
from tests.support.ftar.ring_rig import nothing_left


@contextmanager
def ring(count: int, **settings: Any) -> Iterator[list[Communicator]]:
    """Communicators 10, 11, ... without an epoch; nothing of them may be left."""
    with nothing_left():
        made = [Communicator(10 + i, token=TOKEN, settings=Settings(**settings)) for i in range(count)]
        try:
            yield made
        finally:
            for comm in made:
                comm.close()


def members(comms: list[Communicator]) -> list[tuple[int, str]]:
    return [(10 + i, c.address) for i, c in enumerate(comms)]


def form(comms: list[Communicator], epoch: int) -> None:
    with ThreadPoolExecutor(len(comms)) as pool:
        list(pool.map(lambda c: c.reconfigure(epoch, members(comms)), comms))


@pytest.mark.parametrize("transport", ["auto", "tcp", "c10d"])
def test_sums_in_and_out_of_place(transport: str) -> None:
    with ring(3, transport=transport, timeout_s=5.0) as comms:
        form(comms, 1)
        for dtype in DTYPES:
            given = [torch.full((4, 5), float(i + 1)).to(dtype) for i in range(3)]
            fresh = [c.all_reduce(x) for c, x in zip(comms, given, strict=True)]
            outs = [torch.empty_like(x) for x in given]
            to_out = [c.all_reduce(x, out=o) for c, x, o in zip(comms, given, outs, strict=True)]
            for work, x in zip(fresh, given, strict=True):
                total = work.wait(10)
                assert (total.shape, total.dtype) == (x.shape[:0] + total.shape, dtype)
                assert torch.equal(total.view(-1), torch.full((20,), 6).to(dtype))
            for work, o in zip(to_out, outs, strict=True):
                work.wait(10)
                assert torch.equal(o, torch.full((4, 5), 6).to(dtype))
            assert [x[0, 0].item() for x in given] == [1, 2, 3], "an input was written"
            in_place = [c.all_reduce(x, preserve_input=False) for c, x in zip(comms, given, strict=True)]
            for work, x in zip(in_place, given, strict=True):
                work.wait(10)
                assert torch.equal(x, torch.full((4, 5), 6).to(dtype))
        assert all(c.state is GroupState.READY and c.epoch == 1 for c in comms)
        expected = {"auto": ("shm", "shm"), "tcp": ("tcp", "tcp"), "c10d": ("c10d", "c10d")}[transport]
        assert all(c.transports == expected for c in comms)
        assert all(c.high_water() > 0 for c in comms)


def test_a_ring_of_one() -> None:
    with ring(1) as (comm,):
        assert (comm.state, comm.epoch) == (GroupState.NEW, 0)
        comm.reconfigure(3, [(10, comm.address)])
        x = torch.arange(6.0).view(2, 3)
        assert torch.equal(comm.all_reduce(x).wait(20).view(2, 3), x)
        assert comm.transports == ()
        assert comm.high_water() == 0
        with pytest.raises(StaleEpoch, match="claimed before"):
            comm.reconfigure(3, [(10, comm.address)])
        with pytest.raises(StaleEpoch):
            comm.reconfigure(2, [(10, comm.address)])
        comm.reconfigure(4, [(10, comm.address)])
        assert comm.epoch == 4


@pytest.mark.parametrize(
    "names", [[], [11], [10, 10], [10, 11, 11]], ids=["nobody", "others", "twice", "another twice"]
)
def test_a_membership_that_cannot_be(names: list[int]) -> None:
    with ring(1) as (comm,), pytest.raises(InvalidArgument, match="each once"):
        comm.reconfigure(1, [(n, comm.address) for n in names])


@pytest.mark.parametrize(
    ("tensor", "out"),
    [
        (torch.ones(3, dtype=torch.int8), None),
        (torch.ones(3, 2).t(), None),
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.ones(3, dtype=torch.float64)),
        (torch.ones(3), torch.ones(3, 2)[:, 0]),
        (torch.ones(3, device="meta"), None),
    ],
    ids=["int8", "strided", "shape", "dtype", "strided out", "device"],
)
def test_a_tensor_that_cannot_be_summed(tensor: torch.Tensor, out: torch.Tensor | None) -> None:
    with ring(1) as (comm,):
        comm.reconfigure(1, [(10, comm.address)])
        with pytest.raises(InvalidArgument):
            comm.all_reduce(tensor, out=out)
        assert comm.all_reduce(torch.ones(3)).wait(20).tolist() == [1.0] * 3


def test_a_ring_that_is_not_formed_in_time() -> None:
    with ring(2) as comms:
        with pytest.raises(ConnectFailed, match=r"not formed within 0.1 s"):
            comms[0].reconfigure(1, members(comms), timeout_s=0.1)
        form(comms, 2)
    with ring(2, connect_timeout_s=1.0) as comms:
        with pytest.raises(RecoverableError) as late:
            comms[0].reconfigure(1, members(comms))
        assert late.value.suspect == 11
        form(comms, 2)


def test_closing_ends_whoever_waits() -> None:
    with ring(2) as comms, ThreadPoolExecutor(1) as pool:
        forming = pool.submit(comms[0].reconfigure, 1, members(comms))
        while comms[0].state is not GroupState.CONFIGURING:
            time.sleep(0.001)
        comms[0].close()
        assert isinstance(forming.exception(20), FTARError)
        assert comms[0].state is GroupState.CLOSED
        comms[0].close()
        with pytest.raises(StaleEpoch, match="CLOSED"):
            comms[0].reconfigure(2, members(comms))
    with ring(2) as comms:
        form(comms, 1)
        works = [comms[0].all_reduce(torch.ones(9)) for _ in range(3)]
        comms[0].close()
        assert all(isinstance(w.exception(20), RecoverableError) for w in works)
        assert works[1].status in ("RETRYABLE", "SKIPPED")


@pytest.mark.parametrize("change", [{"token": "cd" * 32}, {"job": "x"}], ids=str)
def test_strangers_do_not_meet(change: dict[str, Any]) -> None:
    settings = Settings(connect_timeout_s=0.3)
    with ExitStack() as stack:
        comms = [
            Communicator(10, token=TOKEN, settings=settings),
            Communicator(11, **({"token": TOKEN} | change), settings=settings),
        ]
        for comm in comms:
            stack.callback(comm.close)
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(c.reconfigure, 1, members(comms)) for c in comms]
            assert all(isinstance(w.exception(20), RecoverableError) for w in waits)
