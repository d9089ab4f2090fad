"""Where kernels are enqueued: a CUDA stream of the plane's own, and its counterpart for interpreted kernels."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

_NON_BLOCKING = ctypes.c_uint(1)  # CU_STREAM_NON_BLOCKING: not in order with the default stream
_NOT_READY = 600  # CUDA_ERROR_NOT_READY: the stream has work


class DeviceStream:
    """A CUDA stream of the highest priority, so that its kernels do not queue behind others.

    The driver makes it: torch hands out 32 in turn, and other work could share one with a kernel that waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._context, self._handle = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # binds the device's context to this thread
            self._made("cuCtxGetCurrent", ctypes.pointer(self._context))
            lowest, highest = ctypes.c_int(), ctypes.c_int()
            self._made("cuCtxGetStreamPriorityRange", ctypes.pointer(lowest), ctypes.pointer(highest))
            self._made("cuStreamCreateWithPriority", ctypes.pointer(self._handle), _NON_BLOCKING, highest)
        self.stream = torch.cuda.ExternalStream(self._handle.value, device)
        self._asked, self._closed = threading.Event(), False
        self._error: str | None = None
        threading.Thread(target=self._ask, name="ftar-device", daemon=True).start()

    def after(self, event: torch.cuda.Event | None) -> None:
        """Let all later work run after `event`; None: after the caller's current stream."""
        if event is None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        else:
            self.stream.wait_event(event)

    def launch(self, call: Callable[[], None]) -> None:
        """Enqueue a kernel; `call` launches it."""
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            call()

    def _ask(self) -> None:
        """Ask the driver how the stream is, each time that `check` wants to know.

        The driver may not answer while it loads a kernel, so this has a thread of its own; ctypes holds no GIL.
        """
        self._driver.cuCtxSetCurrent(self._context)
        while self._asked.wait() and not self._closed:
            self._asked.clear()
            code = self._driver.cuStreamQuery(self._handle)
            if code not in (0, _NOT_READY):
                self._error = self._told(code)
        self._driver.cuStreamDestroy_v2(self._handle)  # as soon as its work is done

    def _made(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises RuntimeError."""
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name}: {self._told(code)}")

    def _told(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(text))
        return f"CUDA driver error {code}: {(text.value or b'unknown').decode()}"

    def check(self) -> None:
        """Raise the error of the device, if one is known; let it be asked for. Does not wait for the device.

        Raises:
            RuntimeError: a kernel or the device has failed.
        """
        self._asked.set()
        if self._error is not None:
            raise RuntimeError(self._error)

    def close(self) -> None:
        """Enqueue nothing more on this stream; its own thread destroys it."""
        self._closed = True
        self._asked.set()


class HostStream:
    """The counterpart for interpreted kernels: a thread that runs what is enqueued, in order.

    The interpreter patches triton's modules while a kernel runs, so only one kernel at a time runs in a process.
    """

    _interpreter = threading.Lock()

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ftar-host-stream", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception as error:  # kept for check(), as a device keeps its errors
                self._error = error

    def after(self, event: torch.cuda.Event | None) -> None:
        """Do nothing: host tensors are ready."""

    def launch(self, call: Callable[[], None]) -> None:
        """Enqueue a kernel; `call` launches it."""

        self._queue.put(partial(self.alone, call))

    @classmethod
    def alone(cls, call: Callable[[], None]) -> None:
        """Interpret a kernel on this thread; blocks until no other one of this process is interpreted."""
        with cls._interpreter:
            call()

    def check(self) -> None:
        """Raise the error of a kernel, if one has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread; blocks until it has ended."""
        self._queue.put(None)
        self._thread.join(timeout=10)
