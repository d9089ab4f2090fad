import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest

from ft_hsdp.core.traces import COMMIT, GroupTrace, RankTrace
from ft_hsdp.train.tracer import EVERY_S, REPEAT_S, Tracer, limit_flight_recorder
from tests.support.forked import Forked

COMMITS = f"{COMMIT} of epoch 1"
RING = GroupTrace("ring 0 of epoch 1", 3, 2, "bucket 2", received=5, sent=7)


class Scene:
    """A rank whose rings are what the test says, at a time that the test says."""

    def __init__(self) -> None:
        self.now, self.progress, self.rings = 100.0, 0, (RING,)
        self.tracer = Tracer(0, lambda: self.now, lambda: self.now)

    def after(
        self, seconds: float, done: int = 0, doing: str = "trains", paused: bool = False
    ) -> RankTrace | None:
        self.now += seconds
        self.progress += done
        return self.tracer.trace(1, self.rings, self.progress, doing, paused)


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """No trace takes so long that the next one comes later."""
    with mock.patch.object(time, "thread_time", return_value=0.0):
        yield


@pytest.fixture
def s() -> Scene:
    scene = Scene()
    assert scene.after(0.0) is not None, "the first look"
    assert scene.after(REPEAT_S, done=1) is None
    return scene


def test_who_gets_on_tells_it_now_and_then_and_who_stands_still_each_time(s: Scene) -> None:
    assert s.after(1.0, done=1) is None
    full = s.after(EVERY_S, done=1)
    assert full is not None
    assert (s.tracer.still_s, full.stack, full.groups[1:2]) == (0.0, (), (RING,))
    assert s.after(1.0, done=1) is full, "a beat may be lost on its way over rank 0"
    assert s.after(1.0, done=1) is None
    for seconds in (1.0, 2.0):
        still = s.after(1.0)
        assert still is not None
        assert (s.tracer.still_s, still.doing) == (seconds, "trains")
        assert any("test_tracer.py" in line for line in still.stack)
    assert s.after(0.05, done=1) is None
    assert s.after(0.05) is None, "beats may come close together"


@pytest.mark.parametrize("start", [200.0, 204.5, 208.0])
def test_all_ranks_that_get_on_tell_it_at_the_same_times(start: float) -> None:
    scene = Scene()
    scene.now = start
    first = scene.after(0.0)
    assert scene.after(209.9 - start, done=1) is None
    told = scene.after(0.2, done=1)
    assert told is not None
    assert told is not first


@pytest.mark.parametrize("what", ["joined", "done", "received", "sent"])
def test_a_ring_in_which_something_moves_is_not_still(s: Scene, what: str) -> None:
    s.rings = (replace(RING, **{what: 9}),)  # type: ignore[arg-type]
    assert s.after(1.0) is None
    s.rings = (replace(s.rings[0], in_s=5.0, blocked_s=5.0),)
    assert s.after(1.0) is not None, "to wait is no movement"


def test_a_time_that_a_look_misses_is_not_negative(s: Scene) -> None:
    s.rings = (replace(RING, in_s=5.0, blocked_s=5.0),)
    assert [s.after(EVERY_S, done=1) is None for _ in range(2)] == [False, False]
    s.rings = (RING,)
    told = s.after(EVERY_S, done=1)
    assert told is not None
    assert (told.groups[1].in_s, told.groups[1].blocked_s) == (0.0, 0.0)


def test_a_pause_is_not_standing_still(s: Scene) -> None:
    assert s.after(5.0, doing="evaluation", paused=True) is None
    told = s.after(EVERY_S, doing="evaluation", paused=True)
    assert told is not None
    assert (s.tracer.still_s, told.doing, told.stack) == (0.0, "evaluation", ())
    assert s.after(1.0) is not None
    assert s.tracer.still_s == 1.0


def test_a_rank_joins_a_step_with_its_vote_and_is_done_with_its_commit(s: Scene) -> None:
    for epoch, vote, commit, counts in (
        (1, 3, 2, (3, 2)),
        (1, 3, 3, (3, 3)),
        (1, 1, 7, (7, 7)),
        (0, 9, 7, (7, 7)),
    ):
        s.tracer.voted(epoch, vote)
        s.tracer.committed(commit)
        told = s.after(EVERY_S)
        assert told is not None
        assert told.groups[0] == GroupTrace(COMMITS, *counts)


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"pg_status": {"0": {}}}', None])
def test_a_torch_that_answers_otherwise_costs_its_groups_alone(
    answer: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        mock.patch("torch._C._distributed_c10d._dump_fr_trace_json", return_value=answer),
    ):
        s = Scene()
        for _ in range(3):
            told = s.after(EVERY_S, done=1)
            assert told is not None
            assert [group.name for group in told.groups] == [COMMITS, RING.name]
    assert len(caplog.records) <= 1


def test_a_user_says_how_much_torch_keeps() -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        with mock.patch.dict("os.environ", {name: "77"}, clear=True) as environment:
            limit_flight_recorder()
            assert environment == {name: "77"}


def _rank(pipe: Connection, rank: int, store: str) -> None:
    """The last all-reduce is one that rank 1 does not join."""
    import torch
    import torch.distributed as dist

    limit_flight_recorder()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    total = torch.ones(1)
    for _ in range(16):
        dist.all_reduce(total)
    tracer = Tracer(7)

    def watch() -> None:
        while (told := tracer.trace(1, (), 0, "trains", paused=False)) is None or not told.stack:
            time.sleep(0.05)
        pipe.send(told)

    threading.Thread(target=watch, daemon=True).start()
    if rank:
        threading.Event().wait()
    dist.all_reduce(total)


def test_a_rank_that_waits_in_a_collective_tells_in_which_one_and_where(tmp_path: Path) -> None:
    ranks = [Forked(_rank, rank, f"{tmp_path}/store") for rank in range(2)]
    try:
        waits, absent = (rank.hear() for rank in ranks)
    finally:
        for rank in ranks:
            rank.close()
    for told, joined in ((waits, 17), (absent, 16)):
        [group] = told.groups[1:]
        assert (group.name, group.joined, group.done, group.op) == ("7:0 gloo", joined, 16, "all_reduce")
        assert [mark.number for mark in group.marks] == [16]
        assert any("train/test_tracer.py" in line and line.endswith(" _rank") for line in told.stack)
    assert any("all_reduce" in line for line in waits.stack)
    assert not any("all_reduce" in line for line in absent.stack)
