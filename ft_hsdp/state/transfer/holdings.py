"""What the state agents of other hosts keep, asked of all of them at once."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.donor_connection import HELD, DonorBusy, DonorConnection
from ft_hsdp.state.transfer.shard_manifest import HeldShard

MAX_ASKED = 4096  # agents that are asked at most
MAX_THREADS = 256  # agents that are asked at once; one that answers nothing keeps its thread until it is hung up
GRACE_S = 0.1  # for further answers when there are enough
RETRY_S = 0.02  # before an agent that has no place for a reader is asked again

Held = tuple[HeldShard, ...]


def ask_held(
    addresses: Iterable[str],
    token: str,
    deadline_s: float,
    enough: Callable[[str, Held], bool] = lambda *_: False,
) -> dict[str, Held]:
    """Ask state agents which complete shards they keep. Blocks for ``deadline_s`` at most, and for one ``enough``.

    Args:
        addresses: "host:port" of each, the most important first; `MAX_ASKED` of them at most are asked.
        token: The job's token, which they check.
        deadline_s: Seconds for all of them; `MAX_THREADS` are asked at once.
        enough: Takes each answer, the address and what is kept there, and tells whether all answers so far are all
            that is needed. Then the others have `GRACE_S` more: a host that is gone may answer nothing at all.

    Returns:
        The shards, by address, of those that have answered in time. Who is gone, late or wrong is not in it. It is
        empty if this process cannot start a thread.
    """
    until = time.monotonic() + deadline_s
    wanted = [*dict.fromkeys(addresses)][:MAX_ASKED]
    answers: queue.SimpleQueue[tuple[str, Held | None]] = queue.SimpleQueue()
    connections = {address: DonorConnection(address, token) for address in wanted}
    left = deque(connections.items())
    started = 0
    for _ in wanted[:MAX_THREADS]:
        try:
            threading.Thread(target=_ask_all, args=(left, until, answers), name="held", daemon=True).start()
        except RuntimeError:  # this process has no thread left; those that were started ask all
            break
        started += 1
    found: dict[str, Held] = {}
    for _ in wanted if started else ():
        left_s = until - time.monotonic()
        if left_s <= 0.0:
            break
        try:
            address, held = answers.get(timeout=left_s)
        except queue.Empty:
            break
        if held is not None:
            found[address] = held
            if enough(address, held):
                until = min(until, time.monotonic() + GRACE_S)
    left.clear()
    for connection in connections.values():
        connection.hang_up()  # a thread that still connects ends by itself
    return found


def _ask_all(
    left: deque[tuple[str, DonorConnection]], until: float, answers: queue.SimpleQueue[tuple[str, Held | None]]
) -> None:
    """Ask one agent after the other, until none is left that no thread asks."""
    while True:
        try:
            address, connection = left.popleft()
        except IndexError:
            return
        answers.put((address, _ask(connection, until)))


def _ask(connection: DonorConnection, until: float) -> Held | None:
    try:
        while time.monotonic() < until:
            try:
                answer = connection.ask(HELD)
            except DonorBusy:
                time.sleep(RETRY_S)
                continue
            if answer.status != 200:
                break
            return shard_manifest.decode_held(connection.read(answer.length, shard_manifest.MAX_HELD_BYTES))
    except (OSError, ValueError, DataCorruption):
        return None
    finally:
        connection.close()
    return None
