"""A ProcessGroupFTAR in a process of its own, which can be killed or stopped in the middle of a reconfigure."""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.support.forked import Forked

# Where a process can be told to stay: the others know that it came, but not its address; it is in their ring.
PLACES = {"claimed": "TorchftMember.admit", "in the ring": "connect_gloo"}


def options(uuid: Any, handles: Any, timeout_s: float | None = None) -> Any:
    """c10d's options of the same name, which torch has from 2.14 on."""
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})


def main(pipe: Connection) -> None:
    """Answer the first message with a handle, then each (uuid, handles, timeout, place) with what came of it."""
    import torch
    from torch.distributed import ReduceOp
    from torch.distributed.distributed_c10d import AllgatherOptions

    from ft_hsdp.compat.torchft import ProcessGroupFTAR, process_group

    group = ProcessGroupFTAR(timedelta(seconds=30), host="127.0.0.1")

    def stay(*_: Any, **__: Any) -> None:
        pipe.send("there")
        threading.Event().wait()

    while (order := pipe.recv()) is not None:
        if order == "handle":
            pipe.send(group.get_reconfigure_handle())
            continue
        uuid, handles, timeout_s, place = order
        begin = time.monotonic()
        try:
            with patch(f"{process_group.__name__}.{PLACES[place]}", stay) if place else nullcontext():
                group.reconfigure(options(uuid, handles, timeout_s)).wait()
            total, parts = torch.ones(1000), [torch.zeros(1) for _ in handles]
            group.allreduce([total], ReduceOp.SUM).wait(timedelta(seconds=20))
            group.allgather([parts], [torch.ones(1)], AllgatherOptions()).wait()
            assert sum(parts) == len(handles)
            pipe.send((total[-1].item(), time.monotonic() - begin))
        except Exception as error:
            pipe.send((str(error), time.monotonic() - begin))
    group.shutdown()


class GroupProcess(Forked):
    def __init__(self) -> None:
        super().__init__(main)

    def handle(self) -> str:
        self.pipe.send("handle")
        said: str = self.hear()
        return said

    def begin(self, uuid: int, handles: list[str], timeout_s: float, place: str = "") -> None:
        """Let it reconfigure, sum ones and gather; at ``place`` it stays for ever. `hear` says what came of it."""
        self.pipe.send((uuid, handles, timeout_s, place))
