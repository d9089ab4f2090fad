"""A member of a ring in a process of its own, which can be killed; the server that forks it has torch already."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

TOKEN = "ab" * 32
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ft_hsdp.ftar"])


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


class MemberProcess:
    def __init__(self, member: int, **settings: Any) -> None:
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=main, args=(theirs, member, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.address: str = self.hear()

    def hear(self) -> Any:
        assert self.pipe.poll(30), "it says nothing"
        return self.pipe.recv()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self.pipe.close()
