"""Batches that torch's workers read ahead: what is expected, what is wrong, and workers that fail."""

import multiprocessing.context
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from ft_hsdp.errors import Retryable
from ft_hsdp.train.data.samples import JobShape, SampleReader
from ft_hsdp.train.data.step_plan import MicroBatch
from ft_hsdp.train.data.workers import ReadOptions, open_loader
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
SHAPE = JobShape(1, 1, 1, 1)


class Diary(Dataset[Any]):
    """Notes each read in a file; may wait, or fail."""

    def __init__(self, folder: Path, does: Callable[[int], None] | None = None) -> None:
        self.folder = folder
        self.does = does

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Any]:
        with (self.folder / "reads").open("a") as file:
            file.write(f"{index}\n")
        if self.does is not None:
            self.does(index)
        worker = get_worker_info()
        noise = torch.tensor([float(torch.rand(())), np.random.rand(), random.random()])
        return {"index": index, "worker": -1 if worker is None else worker.id, "noise": noise}

    def reads(self) -> list[int]:
        file = self.folder / "reads"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def at(index: int) -> MicroBatch:
    return MicroBatch(0, index, 0, index)


def after(index: int) -> Iterator[MicroBatch]:
    return map(at, count(index))


@contextmanager
def reading(data: Dataset[Any], workers: int = 2, factor: int = 2, **options: Any) -> Iterator[Any]:
    samples = SampleReader(data, 1, None, False, True, 5)
    reader = open_loader(samples, SHAPE, ReadOptions(workers, factor, **options))
    try:
        yield reader
    finally:
        reader.close()
        until(lambda: not active_children(), "the workers end")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_come_as_asked_for_and_each_is_read_once(tmp_path: Path, workers: int) -> None:
    data = Diary(tmp_path)
    with reading(data, workers) as reader:
        reader.guess(after(0))
        for index in range(20):
            batch = reader.batch(at(index), after(index + 1))
            assert batch["index"].tolist() == [index]
            assert (int(batch["worker"]) >= 0) is (workers > 0)
        until(lambda: len(data.reads()) >= 20 + 2 * workers, "what is expected next is read")
    assert sorted(data.reads()) == list(range(20 + 2 * workers))


def test_the_numbers_that_are_drawn_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    noise = []
    for workers, order in ((0, range(8)), (2, range(8)), (1, [4, 0, 5, 1, 6, 2, 7, 3])):
        with reading(Diary(tmp_path), workers) as reader:
            drawn = {index: reader.batch(at(index), after(index + 1))["noise"] for index in order}
        noise.append(torch.cat([drawn[index] for index in range(8)]))
    assert torch.equal(noise[0], noise[1])
    assert torch.equal(noise[0], noise[2])
    assert len(noise[0].unique()) == noise[0].numel()


def test_wrong_guesses_cost_reads_and_nothing_else(tmp_path: Path) -> None:
    data = Diary(tmp_path)
    with reading(data) as reader:
        reader.guess(after(0))
        for jump in (50, 7, 8, 300, 299, 0):
            batch = reader.batch(at(jump), after(jump + 1))
            assert batch["index"].tolist() == [jump]
        assert reader.batch(at(900), [])["index"].tolist() == [900], "nothing is expected"
    assert len(data.reads()) <= 7 + 7 * 4


def explode(index: int) -> None:
    if index == 3:
        raise KeyError("no such picture")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_where_its_batch_is_asked_for(tmp_path: Path, workers: int) -> None:
    with reading(Diary(tmp_path, explode), workers) as reader:
        reader.guess(after(3))
        assert reader.batch(at(0), after(3))["index"].tolist() == [0], "it is an error of a guess so far"
        assert reader.batch(at(1), after(2))["index"].tolist() == [1]
        with pytest.raises(KeyError, match="no such picture"):
            reader.batch(at(3), after(4))
        assert reader.batch(at(4), after(5))["index"].tolist() == [4]


def die(index: int) -> None:
    if index == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_an_error_at_once(tmp_path: Path) -> None:
    with reading(Diary(tmp_path, die), timeout=60) as reader:
        reader.guess(after(0))
        assert reader.batch(at(0), after(1))["index"].tolist() == [0]
        began = time.monotonic()
        with pytest.raises(Retryable) as died:
            reader.batch(at(3), after(4))
        assert time.monotonic() - began < 30.0, "torch itself looks at its workers when the timeout is over"
        for child in active_children():
            child.kill()  # torch waits on
        found = re.fullmatch(r"the data of this rank: worker process (\d+) has ended with (.*)", str(died.value))
        assert found is not None
        assert found[2] == "signal 9 (SIGKILL)"
        assert int(found[1]) != os.getpid()


def hang(index: int) -> None:
    if index == 3:
        time.sleep(3600)


def test_a_worker_that_hangs_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    """Torch says so itself; it is one line, and may be tried again."""
    with reading(Diary(tmp_path, hang), timeout=5) as reader:
        reader.guess(after(0))
        assert reader.batch(at(0), after(1))["index"].tolist() == [0]
        with pytest.raises(Retryable, match=r"^the data of this rank: DataLoader timed out after 5 seconds$"):
            reader.batch(at(3), after(4))
        for child in active_children():
            child.kill()


def test_a_closed_reader_reads_no_more(tmp_path: Path) -> None:
    with reading(Diary(tmp_path), 0) as reader:
        reader.close()
        with pytest.raises(RuntimeError, match="the reader is closed"):
            reader.batch(at(0), [])


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def catches(pid: int, number: int) -> bool:
    """Whether a process handles or ignores a signal."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(lines["SigCgt"], 16) | int(lines["SigIgn"], 16)) & 1 << (number - 1))


def test_workers_do_not_outlive_a_rank_that_is_killed(tmp_path: Path) -> None:
    """They would hold its connections open: other processes notice by their end that it is gone."""
    program = f"""
import signal, pathlib
from torch.utils.data import _utils
from ft_hsdp.lifetime import die_with
from ft_hsdp.train.data.samples import SampleReader
from ft_hsdp.train.data.workers import ReadOptions, open_loader
from tests.train.data.test_workers import SHAPE, Diary, after, hang
die_with({os.getpid()})
_utils.worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # between two looks of torch's workers for their parent
folder = pathlib.Path({str(tmp_path)!r})
signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
reader = open_loader(SampleReader(Diary(folder, hang), 1, None, False, True, 5), SHAPE, ReadOptions(2))
reader.guess(after(3))
while True:
    signal.pause()
"""
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    try:
        until(lambda: 3 in Diary(tmp_path).reads(), "a worker hangs")
        workers = psutil.Process(rank.pid).children()
        assert len(workers) == 2
        # A shell may have SIGQUIT ignored from the start; nothing but the worker itself has SIGUSR2 ignored.
        last = signal.SIGUSR2, signal.SIGQUIT
        until(lambda: all(catches(w.pid, number) for w in workers for number in last), "both have begun")
        os.killpg(rank.pid, signal.SIGTERM)
        until((tmp_path / "told").exists, "the rank is told to leave")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
            for worker in workers:
                worker.send_signal(number)  # to all processes of a job
        assert all(alive(w) for w in workers), "its data is read on until it has left"
    finally:
        rank.kill()
        rank.wait()
    until(lambda: not any(map(alive, workers)), "they end")


def test_workers_of_a_fork_server_read_the_same(tmp_path: Path) -> None:
    with reading(Diary(tmp_path), 1, multiprocessing_context="forkserver") as reader:
        assert reader.batch(at(5), after(6))["index"].tolist() == [5]


class Marked(multiprocessing.context.ForkProcess):
    """A worker process of a user's own."""

    def run(self) -> None:
        os.environ["MARKED"] = self.name
        super().run()


class Marking(multiprocessing.context.ForkContext):
    """A context of a user's own."""

    Process = Marked


class Mark(Dataset[Any]):
    """Tells whether its worker is a user's own, and whether the thread that forked it was the main one."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> list[bool]:
        return ["MARKED" in os.environ, threading.main_thread().name == "MainThread"]


@pytest.mark.parametrize(("context", "own"), [(None, False), (Marking(), True)])
def test_workers_are_of_the_users_context_and_forked_by_the_thread_that_opens_the_reader(context, own) -> None:
    """A fork elsewhere would end the main thread in the child, and all that torch caches for it.

    That may be the last that holds a process group, and its end there is a segmentation fault.
    """
    with reading(Mark(), 1, multiprocessing_context=context) as reader:
        assert torch.stack(reader.batch(at(3), after(4))).flatten().tolist() == [own, True]
