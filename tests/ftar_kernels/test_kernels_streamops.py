"""Stream memory operations: how the driver is called, and what a thread does in its place."""

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from ftar_kernels import streamops


@pytest.fixture
def device_stream(monkeypatch):
    """A DeviceStream whose driver writes down what it is asked, on a machine without one."""
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=77, device=device)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    return streamops.DeviceStream(torch.device("cuda", 0))


def record(into, code=0):
    def call(*arguments):
        into.append(tuple(argument.value for argument in arguments))
        return code

    return call


def test_waits_for_at_least_the_value(device_stream):
    calls = []
    device_stream._driver.cuStreamWaitValue32_v2 = record(calls)
    device_stream.wait_value(0x1000, 5)
    assert calls == [(77, 0x1000, 5, 0)]


def test_the_older_entry_serves_where_the_newer_is_missing(device_stream):
    calls = []
    device_stream._driver.cuStreamWriteValue32 = record(calls)
    device_stream.write_value(0x2000, 6)
    assert calls == [(77, 0x2000, 6, 0)]


def test_a_driver_without_them_is_unsupported(device_stream):
    with pytest.raises(streamops.Unsupported, match="no cuStreamWaitValue32"):
        device_stream.wait_value(0, 1)
    device_stream._driver.cuStreamWaitValue32 = record([], 801)
    with pytest.raises(streamops.Unsupported, match="801"):
        device_stream.wait_value(0, 1)


def test_the_twin_keeps_the_order_and_waits():
    stream = streamops.HostStream()
    words = (ctypes.c_int32 * 2)()
    address, ran = ctypes.addressof(words), threading.Event()
    stream.wait_value(address, 3)
    stream.launch(ran.set)
    stream.write_value(address + 4, 9)
    assert not ran.wait(0.05)
    words[0] = 3
    assert ran.wait(10)
    stream.close()
    assert words[1] == 9


def test_the_twin_keeps_the_first_error_for_whoever_asks():
    stream = streamops.HostStream()
    stream.launch(lambda: 1 / 0)
    stream.close()
    with pytest.raises(ZeroDivisionError):
        stream.check()


def test_closing_the_twin_ends_a_wait():
    stream = streamops.HostStream()
    word = ctypes.c_int32()
    stream.wait_value(ctypes.addressof(word), 1)
    stream.close()
    assert not stream._thread.is_alive()
