"""Cases that need interpreted kernels; test_kernels_interpreted runs them in a process of its own."""

import threading
import time
from unittest import mock

import pytest
import torch

from benchmarks.kernels import checks, limits, stepped
from ft_hsdp.core.ring import OperationKind
from ftar_kernels.flags import Command, FlagPage, Status, host_buffer
from ftar_kernels.handshake import INTERPRETED
from ftar_kernels.plane import Aborted, Expired, StagedPlane, Stuck
from ftar_kernels.streams import HostStream
from ftar_kernels.summary import BLOCK, reference, summarize
from tests.support.waiting import until

CPU = torch.device("cpu")
NOTHING = Command(OperationKind.STORE, 0, 0)
assert INTERPRETED


@pytest.fixture
def make():
    planes = []

    def plane(**options):
        buffers = [host_buffer(4096, CPU) for _ in range(2)]
        planes.append(StagedPlane(CPU, *buffers, programs=1, **{"depth": 4, "silence_s": 20.0, **options}))
        return planes[-1]

    yield plane
    for each in planes:
        each.close()


def test_kernels_equal_the_reference():
    assert checks.kernels(CPU)["wrong"] == []


def test_commands_equal_the_reference():
    assert checks.commands(CPU)["wrong"] == []


def test_a_copy_keeps_every_bit():
    bits = torch.tensor([0x7FC00001, 0x7F800001, -(2**31), 1, 0x807FFFFF - 2**32], dtype=torch.int32)
    src = checks.empty(5, torch.float32, CPU)
    src.view(torch.int32).copy_(bits)
    dst = checks.empty(5, torch.float32, CPU)
    stepped.reduce_copy(src, None, dst)
    assert torch.equal(dst.view(torch.int32), bits)


def test_commands_finish_in_their_order_and_buffers_are_used_again(make):
    plane = make()
    local, out = checks.fresh(40, torch.float32, CPU), checks.empty(40, torch.float32, CPU)
    job = plane.open(local, out, 10)
    given = [Command(OperationKind.STORE, 4 * i, 4 * i + 4) for i in range(10)]
    done = []
    for command in given:
        while len(done) + 4 <= given.index(command):
            done += job.completed()
        job.post(command)
    done += checks.drain(job, 10 - len(done))
    job.close(failed=False)
    assert done == given
    assert torch.equal(out, local)


def test_an_abort_ends_the_wait_and_the_plane_serves_again(make):
    plane = make()
    local, out = checks.fresh(16, torch.float32, CPU), checks.empty(16, torch.float32, CPU)
    job = plane.open(local, out, 100)
    job.post(Command(OperationKind.STORE, 0, 8))
    checks.drain(job, 1)
    threading.Timer(0.05, plane.abort).start()
    with pytest.raises(Aborted):
        checks.drain(job, 1)
    job.close(failed=True)
    out.zero_()
    again = plane.open(local, out, 1)
    again.post(Command(OperationKind.STORE, 0, 16))
    checks.drain(again, 1)
    again.close(failed=False)
    assert torch.equal(out, local)


class LoadsWhenIdle(HostStream):
    """A device whose driver loads a kernel at its first launch, and only after all that was enqueued before."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded = False

    def launch(self, call):
        if not self._loaded:
            idle = threading.Event()
            super().launch(idle.set)
            assert idle.wait(10), "the driver loads a kernel while the stream waits for the host"
            self._loaded = True
        super().launch(call)


def test_kernels_are_loaded_while_nothing_waits_for_the_host(make):
    plane = make()
    plane.stream.close()
    plane.stream = LoadsWhenIdle()
    plane.warm_up((torch.float32,))


def test_an_aborted_command_does_nothing(make):
    plane = make()
    local, out = checks.fresh(16, torch.float32, CPU), checks.empty(16, torch.float32, CPU).zero_()
    job = plane.open(local, out, 2)
    plane.abort()
    job.post(Command(OperationKind.STORE, 0, 16))
    job.close(failed=True)
    assert not out.any()


def test_a_persistent_kernel_ends_by_its_deadline():
    waited = limits.deadline(CPU, 0.1)["waited_s"]
    assert waited >= 0.09


def test_a_kernel_ends_by_itself_if_the_engine_is_silent_and_the_host_learns_of_it():
    plane = StagedPlane(CPU, host_buffer(64, CPU), host_buffer(64, CPU), programs=1, silence_s=0.05)
    tensor = checks.empty(4, torch.float32, CPU)
    job = plane.open(tensor, tensor, 1)
    until(lambda: plane.page.status(0) is Status.EXPIRED)
    with pytest.raises(Expired):
        checks.drain(job, 1)
    job.close(failed=True)
    again = plane.open(tensor, tensor, 1)
    again.post(NOTHING)
    checks.drain(again, 1)
    again.close(failed=False)
    plane.close()


def test_a_kernel_waits_however_long_while_the_engine_asks():
    plane = StagedPlane(CPU, host_buffer(64, CPU), host_buffer(64, CPU), programs=1, silence_s=0.05)
    tensor = checks.empty(4, torch.float32, CPU)
    job = plane.open(tensor, tensor, 1)
    until(lambda: plane.page.status(0) is Status.RUNNING)
    end = time.monotonic() + 20 * 0.05
    while time.monotonic() < end:
        assert not job.completed()
    job.post(NOTHING)
    checks.drain(job, 1)
    job.close(failed=False)
    plane.close()


def test_a_kernel_that_is_queued_is_waited_for_and_one_that_runs_is_stuck_after_a_shorter_time():
    plane = StagedPlane(CPU, host_buffer(64, CPU), host_buffer(64, CPU), programs=1, grace_s=0.05, hold_s=0.4)
    tensor = checks.empty(4, torch.float32, CPU)
    gate = threading.Event()
    plane.stream.launch(gate.wait)  # other work of the device
    job = plane.open(tensor, tensor, 1)
    assert not job.begun
    begin = time.monotonic()
    with pytest.raises(Stuck, match="not begun"):
        job.close(failed=True)
    assert time.monotonic() - begin >= 0.4
    gate.set()
    job.close(failed=True)  # the kernel runs at last, and finds the abort word set
    with mock.patch.object(plane.page, "status", return_value=Status.RUNNING):
        stuck = plane.open(tensor, tensor, 1)
        with pytest.raises(Stuck, match="not ended"):
            stuck.close(failed=True)
    stuck.close(failed=True)
    plane.close()


def test_a_full_queue_is_refused(make):
    plane = make(depth=2)
    page = plane.page
    page.posted = 2
    with pytest.raises(BufferError, match="2 commands"):
        page.post(NOTHING, True, 4)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (Command(OperationKind.STORE, 0, 17), "of 16"),
        (Command(OperationKind.STORE, 8, 4), "8 to 4"),
        (Command(OperationKind.STORE, 0, 8, 1020), "at 1020"),
        (Command(OperationKind.COPY_SEND, 0, 8, None, -4), "at -4"),
        (Command(OperationKind.STORE, 1, 8, 4), "differ modulo 4"),
    ],
)
def test_a_chunk_outside_the_buffers_is_refused(make, command, problem):
    plane = make()
    tensor = checks.empty(16, torch.float32, CPU)
    job = plane.open(tensor, tensor, 1)
    with pytest.raises(ValueError, match=problem):
        job.post(command)
    job.close(failed=True)


def test_more_commands_than_announced_are_refused(make):
    plane = make()
    tensor = checks.empty(16, torch.float32, CPU)
    job = plane.open(tensor, tensor, 1)
    job.post(NOTHING)
    with pytest.raises(ValueError, match="more than the 1"):
        job.post(NOTHING)
    job.close(failed=True)


def test_unsuitable_tensors_are_refused(make):
    plane = make()
    good = checks.empty(16, torch.float32, CPU)
    for bad, problem in [
        (good[1:], "multiple of 16"),
        (good.view(4, 4), "flat"),
        (good[::2], "flat"),
        (good.view(torch.int16), "int16"),
    ]:
        with pytest.raises(ValueError, match=problem):
            plane.open(bad, bad, 1)
    with pytest.raises(ValueError, match="8 elements into 16"):
        plane.open(good[:8], good, 1)


def test_an_abort_is_never_hidden_by_a_post():
    page = FlagPage(host_buffer(FlagPage.nbytes(2, 4), CPU), 2, 4)
    page.abort()
    page.post(NOTHING, True, 4)
    assert page.aborted
    assert page.words[32].item() == page.words[64].item() == 2**31 - 1


def test_words_of_different_writers_share_no_cache_line():
    page = FlagPage(host_buffer(FlagPage.nbytes(2, 4), CPU), 2, 4)
    lines = [0, *(page.post_line(p) for p in range(2)), *(page.done_line(p) for p in range(2))]
    assert len(set(lines)) == 5
    assert page.words.data_ptr() % 128 == 0
    assert page.commands.data_ptr() == page.words.data_ptr() + 5 * 128


@pytest.mark.parametrize("size", [1, BLOCK + 1, 2 * BLOCK + 5])
def test_a_summary_equals_the_reference_wherever_the_values_lie(size):
    assert checks.summaries(CPU)["wrong"] == []
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    found = summarize(values, ((0, size),))()
    assert found[0] == reference(values, ())[0]
    assert found[1] == pytest.approx(reference(values, ((0, size),))[1], rel=1e-14)
    assert summarize(torch.cat([torch.zeros(3), values])[3:], ((0, size),))() == found


def test_a_summary_of_spans_leaves_out_the_rest():
    values = torch.arange(1000.0)
    digest, squares = summarize(values, ((0, 3), (10, 10), (998, 1000)))()
    assert (digest, squares) == (reference(values, ())[0], [5.0, 0.0, 998.0**2 + 999.0**2])
    assert summarize(values, ())() == (digest, [])


def test_a_digest_tells_a_changed_bit_a_swap_and_a_place():
    values = torch.randn(BLOCK + 9)
    swapped, moved = values.clone(), values.roll(1)
    swapped[[3, BLOCK + 3]] = values[[BLOCK + 3, 3]]
    found = {summarize(each, ())()[0] for each in (values, swapped, moved, values[:-1])}
    for place in (0, BLOCK - 1, BLOCK + 8):
        for bit in (0, 17, 31):
            flipped = values.clone()
            flipped.view(torch.int32)[place] ^= torch.tensor(1 << bit).to(torch.int32)
            found.add(summarize(flipped, ())()[0])
    assert len(found) == 4 + 9
    assert summarize(torch.tensor([0.0]), ())() != summarize(torch.tensor([-0.0]), ())()
