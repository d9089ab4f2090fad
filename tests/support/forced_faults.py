import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ft_hsdp import fault_injection
from ft_hsdp.fault_injection import FaultOrder
from tests.support import os_faults  # noqa: F401 - registers its kinds

ME = 1
Enforced = Callable[..., contextlib.ExitStack]


@contextlib.contextmanager
def enforcing(run: Path) -> Iterator[Enforced]:
    """Put orders into force in this process, as replica ME; a call ends what the one before began."""
    with contextlib.ExitStack() as faked:

        def put(*orders: FaultOrder) -> contextlib.ExitStack:
            faked.close()
            fault_injection.enforce(orders, run.resolve(), ME, faked)
            return faked

        yield put
        put()
