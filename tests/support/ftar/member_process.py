"""A member of a ring in a process of its own, which can be killed; the server that forks it has torch already."""

from multiprocessing.connection import Connection
from typing import Any

from tests.support.forked import Forked

TOKEN = "ab" * 32


def main(pipe: Connection, member: int, settings: dict[str, Any]) -> None:
    """Do what the pipe says: (epoch, members, elements), once; then wait to be told to go, or to be killed."""
    from ft_hsdp.ftar import Communicator, Settings

    comm = Communicator(member, token=TOKEN, settings=Settings(**settings))
    pipe.send(comm.address)
    epoch, members, elements = pipe.recv()
    comm.reconfigure(epoch, members)
    x = comm.empty(elements).fill_(float(member + 1))
    pipe.send(comm.all_reduce(x).wait(20)[0].item())
    pipe.send("ready")
    if pipe.recv() == "take part":
        works = [comm.all_reduce(x) for _ in range(200)]
        pipe.send("under way")
        pipe.send([type(w.exception(20)).__name__ for w in works])
    comm.close()


class MemberProcess(Forked):
    def __init__(self, member: int, **settings: Any) -> None:
        super().__init__(main, member, settings)
        self.address: str = self.hear()
