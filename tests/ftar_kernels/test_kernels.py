"""What a command says to the device, and how the driver is called, on a machine without one."""

import contextlib
import ctypes
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from ft_hsdp.core.ring import OperationKind
from ftar_kernels import streams
from ftar_kernels.flags import FROM_LOCAL, FROM_RECV, TO_OUT, TO_SEND, Command

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")


# The mode of a command says which buffers the device reads and which it writes.


@pytest.mark.parametrize(
    ("kind", "recv", "contributes", "mode"),
    [
        (OperationKind.COPY_SEND, None, True, FROM_LOCAL | TO_SEND),
        (OperationKind.COPY_SEND, None, False, 0),
        (OperationKind.REDUCE_SEND, 0, True, FROM_RECV | FROM_LOCAL | TO_SEND),
        (OperationKind.REDUCE_SEND, 0, False, FROM_RECV | TO_SEND),
        (OperationKind.REDUCE_SEND, None, True, FROM_LOCAL | TO_SEND),
        (OperationKind.REDUCE_SEND, None, False, 0),
        (OperationKind.REDUCE_STORE_SEND, 0, True, FROM_RECV | FROM_LOCAL | TO_SEND | TO_OUT),
        (OperationKind.REDUCE_STORE_SEND, None, False, TO_SEND | TO_OUT),
        (OperationKind.STORE_SEND, 0, True, FROM_RECV | TO_SEND | TO_OUT),
        (OperationKind.STORE, 0, True, FROM_RECV | TO_OUT),
        (OperationKind.STORE, None, True, FROM_LOCAL | TO_OUT),
    ],
)
def test_a_command_says_what_is_read_and_written(kind, recv, contributes, mode):
    assert Command(kind, 0, 4, recv, 0 if kind.sends else None).mode(contributes) == mode


# How the driver is called, and what a thread does in its place.


@pytest.fixture
def driver(monkeypatch):
    """A driver that writes down what it is asked, on a machine without one."""
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


@pytest.fixture
def device_stream(monkeypatch, driver):
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda at, device: SimpleNamespace(at=at, device=device))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return streams.DeviceStream(torch.device("cuda", 0))


class Driver(SimpleNamespace):
    """A driver with a context 5 and priorities from 0 to -5."""

    def __init__(self):
        super().__init__(made=[], bound=threading.Event(), destroyed=threading.Event())

    def cuCtxGetCurrent(self, context):
        context.contents.value = 5
        return 0

    def cuCtxGetStreamPriorityRange(self, lowest, highest):
        lowest.contents.value, highest.contents.value = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, stream, flags, priority):
        stream.contents.value = 77
        self.made.append((flags.value, priority.value))
        return 0

    def cuCtxSetCurrent(self, context):
        assert context.value == 5
        self.bound.set()

    def cuStreamDestroy_v2(self, stream):
        assert stream.value == 77
        self.destroyed.set()


def test_the_stream_is_nobody_elses_and_goes_with_the_plane(device_stream, driver):
    assert (driver.made, device_stream.stream.at) == ([(1, -5)], 77)
    device_stream.close()
    assert driver.destroyed.wait(30)
    assert driver.bound.is_set()


def test_the_engine_learns_of_an_error_and_never_waits_for_the_driver(device_stream, driver):
    """A thread that loads a kernel may hold the driver until the engine has posted."""
    held, asked, code = threading.Event(), threading.Event(), [600]

    def query(stream):
        asked.set()
        assert held.wait(30)
        return code[0]

    driver.cuStreamQuery = query
    driver.cuGetErrorString = lambda code, text: None
    for _ in range(3):
        device_stream.check()
    assert asked.wait(30)
    held.set()
    code[0] = 700
    found: list[str] = []
    end = time.monotonic() + 30
    while not found and time.monotonic() < end:
        try:
            device_stream.check()
        except RuntimeError as error:
            found.append(str(error))
    assert found == ["CUDA driver error 700: unknown"]
    device_stream.close()


def test_the_twin_keeps_the_order():
    stream, ran = streams.HostStream(), []
    for number in range(3):
        stream.launch(lambda number=number: ran.append(number))
    stream.close()
    assert ran == [0, 1, 2]


def test_the_twin_keeps_the_first_error_for_whoever_asks():
    stream = streams.HostStream()
    stream.launch(lambda: 1 / 0)
    stream.close()
    with pytest.raises(ZeroDivisionError):
        stream.check()
