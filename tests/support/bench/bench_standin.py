"""Contenders for tests: gloo, with faults on demand, and a donor whose state is not what its receiver expects."""

import os
import signal
import threading

from torch import Tensor

from benchmarks.allreduce_ranks import Gloo
from benchmarks.state_fetch import FetchSpec, RawDonor


class StandIn(Gloo):
    """The option ``fault`` says what member 1 does in an all-reduce; then the other member only waits for it.

    Faults: "wrong" (one element of its sum), "dies", "fails" (an error that nobody expects).
    """

    def all_reduce(self, source: Tensor, sink: Tensor) -> None:
        fault = self.spec.options.get("fault", "")
        if fault in ("dies", "fails") and self.spec.member == 0:
            threading.Event().wait()
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "fails":
            raise ZeroDivisionError("on\ndemand")
        super().all_reduce(source, sink)
        if fault == "wrong" and self.spec.member == 1:
            sink[5] += 1


class WrongDonor(RawDonor):
    def __init__(self, spec: FetchSpec) -> None:
        super().__init__(spec)
        self._buffer.bytes[-1] ^= 1
