from __future__ import annotations

import pytest
import torch

from ft_hsdp import errors
from ft_hsdp.errors import FTARError
from ft_hsdp.ftar.allreduce import AllReduceResult
from ft_hsdp.ftar.executor import Work


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("PeerDead", "RETRYABLE"),
        ("PeerTimeout", "RETRYABLE"),
        ("RemoteAbort", "RETRYABLE"),
        ("StaleEpoch", "RETRYABLE"),
        ("ConnectFailed", "RETRYABLE"),
        ("Skipped", "SKIPPED"),
        ("ProtocolViolation", "FATAL"),
        ("DataCorruption", "FATAL"),
        ("InvalidArgument", "FATAL"),
        ("LocalSystemError", "FATAL"),
    ],
)
def test_how_a_failed_work_stands(name: str, status: str) -> None:
    work, error = Work(), getattr(errors, name)("why", suspect=3)
    assert work.status == "PENDING"
    work.set_exception(error)
    assert work.status == status
    with pytest.raises(FTARError) as raised:
        work.wait(0)
    assert raised.value.suspect == 3


def test_what_is_no_error_of_the_ring_is_fatal() -> None:
    work = Work()
    work.set_exception(MemoryError("ours"))
    assert work.status == "FATAL"


def test_a_work_that_is_done() -> None:
    work, out = Work(), torch.ones(3)
    with pytest.raises(TimeoutError):
        work.wait(0)
    work.set_result(AllReduceResult(out, (), 0))
    assert work.status == "SUCCESS"
    assert work.wait() is out
