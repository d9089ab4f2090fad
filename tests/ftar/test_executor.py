import threading
import time
from collections.abc import Iterator

import pytest
import torch

from ft_hsdp import errors
from ft_hsdp.errors import FTARError, PeerDead, RemoteAbort, Skipped, StaleEpoch
from ft_hsdp.ftar.allreduce import AllReduceOrder, AllReduceResult, Ring
from ft_hsdp.ftar.dataplane.cpu import CpuPlane
from ft_hsdp.ftar.executor import Executor, Work
from ft_hsdp.ftar.frame import Key
from ft_hsdp.ftar.settings import Settings
from tests.support.ftar.ring_values import KEY, entry
from tests.support.waiting import until


class Scripted(Ring):
    """A ring of one that says what it does, and fails when it is told to."""

    def __init__(self, epoch: int, log: list[str]) -> None:
        super().__init__(epoch, [0], 0, None, None, CpuPlane(), Settings(chunk_bytes=16, chunks=1))
        self.log = log
        self.go = threading.Event()
        self.go.set()
        self.fails: FTARError | None = None

    def all_reduce(self, order: AllReduceOrder) -> AllReduceResult:
        self.log.append(f"reduce {self.epoch}")
        assert self.go.wait(20)
        if self.fails is not None:
            raise self.fails
        return super().all_reduce(order)

    def dispose(self) -> None:
        self.log.append(f"dispose {self.epoch}")
        super().dispose()


class Scene:
    def __init__(self, patience_s: float = 1.0) -> None:
        self.log: list[str] = []
        self.failed: list[tuple[int, FTARError]] = []
        self.crashed: list[Exception] = []
        self.executor = Executor(
            patience_s,
            lambda e, x: self.failed.append((e, x)),
            lambda *_: None,
            lambda _, x: self.crashed.append(x),
        )

    def ring(self, epoch: int) -> Scripted:
        made = Scripted(epoch, self.log)
        self.executor.expect(epoch)
        self.executor.run_on(made)
        return made

    def queue(self, epoch: int) -> Work:
        key = Key(epoch, 1, 0, 0, KEY.prev)
        return self.executor.queue(AllReduceOrder(key, torch.ones(3), torch.empty(3), entry(0)))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.executor.close()


def test_it_lets_go_even_if_the_next_work_was_queued_before_its_end(scene: Scene) -> None:
    first = scene.ring(1)
    first.go.clear()
    works = [scene.queue(1), scene.queue(2)]
    until(lambda: scene.log)
    scene.executor.over(1, StaleEpoch("a newer epoch"))
    scene.ring(2)
    first.go.set()
    for work in works:
        work.result(20)
    assert scene.log.index("dispose 1") < scene.log.index("reduce 2")


def test_a_ring_that_nobody_uses_any_more_is_let_go_of_without_a_next_work(scene: Scene) -> None:
    scene.ring(1)
    scene.queue(1).result(20)
    scene.executor.over(1, StaleEpoch("over"))
    scene.executor.close()
    assert "dispose 1" in scene.log


def test_what_stands_behind_a_failure_is_skipped(scene: Scene) -> None:
    ring = scene.ring(1)
    ring.go.clear()
    ring.fails = PeerDead("it is gone", suspect=3)
    works = [scene.queue(1) for _ in range(3)]
    while "reduce 1" not in scene.log:
        time.sleep(0.001)
    scene.executor.over(1, RemoteAbort("replica 4 is gone", suspect=4))
    ring.go.set()
    errors = [w.exception(20) for w in works]
    assert [type(e) for e in errors] == [RemoteAbort, Skipped, Skipped], "what the group knows counts more"
    assert all(isinstance(e, FTARError) and e.suspect == 4 for e in errors)
    assert scene.failed == [(1, ring.fails)]
    assert scene.log.count("reduce 1") == 1
    scene.ring(2)
    assert scene.queue(2).result(20).entries == (entry(0),)


def test_works_of_a_ring_that_is_not_formed(scene: Scene) -> None:
    scene.executor.expect(1)
    work, late = scene.queue(1), scene.queue(0)
    scene.executor.over(1, RemoteAbort("gave it up", suspect=2))
    assert isinstance(work.exception(20), RemoteAbort)
    assert isinstance(late.exception(20), StaleEpoch)


def test_a_work_does_not_wait_for_its_ring_for_ever() -> None:
    scene = Scene(patience_s=0.05)
    scene.executor.expect(2)
    assert isinstance(scene.queue(2).exception(20), PeerDead)
    scene.executor.close()


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


def test_a_work_that_is_done() -> None:
    work, out = Work(), torch.ones(3)
    with pytest.raises(TimeoutError):
        work.wait(0)
    work.set_result(AllReduceResult(out, (), 0))
    assert work.status == "SUCCESS"
    assert work.wait() is out
