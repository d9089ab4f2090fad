"""What the state agents of other hosts keep, asked of all of them at once."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection

from ft_hsdp.errors import DataCorruption
from ft_hsdp.state.transfer import shard_manifest
from ft_hsdp.state.transfer.donor_connection import HELD, DonorBusy, DonorConnection
from ft_hsdp.state.transfer.shard_manifest import HeldShard

MAX_ASKED = 4096  # agents that are asked at most
GRACE_S = 0.1  # for further answers when there are enough
RETRY_S = 0.02  # before an agent that has no place for a reader is asked again

Held = tuple[HeldShard, ...]


def ask_held(
    addresses: Collection[str],
    token: str,
    deadline_s: float,
    enough: Callable[[dict[str, Held]], bool] = lambda _: False,
) -> dict[str, Held]:
    """Ask state agents which complete shards they keep. Blocks for ``deadline_s`` at most.

    Args:
        addresses: "host:port" of each; `MAX_ASKED` of them at most are asked.
        token: The job's token, which they check.
        deadline_s: Seconds for all of them, which are asked at once.
        enough: Whether the answers so far are all that is needed; asked after each. Then the others have `GRACE_S`
            more: a host that is gone may answer nothing at all.

    Returns:
        The shards, by address, of those that have answered in time. Who is gone, late or wrong is not in it.
    """
    until = time.monotonic() + deadline_s
    wanted = sorted(set(addresses))[:MAX_ASKED]
    answers: queue.SimpleQueue[tuple[str, Held | None]] = queue.SimpleQueue()
    connections = {address: DonorConnection(address, token) for address in wanted}
    for address, connection in connections.items():
        arguments = (address, connection, until, answers)
        threading.Thread(target=_ask, args=arguments, name="held", daemon=True).start()
    found: dict[str, Held] = {}
    with contextlib.suppress(queue.Empty):
        for _ in wanted:
            address, held = answers.get(timeout=max(0.0, until - time.monotonic()))
            if held is not None:
                found[address] = held
                if enough(found):
                    until = min(until, time.monotonic() + GRACE_S)
    for connection in connections.values():
        connection.hang_up()  # a thread that still connects ends by itself
    return found


def _ask(
    address: str, connection: DonorConnection, until: float, answers: queue.SimpleQueue[tuple[str, Held | None]]
) -> None:
    held = None
    try:
        while held is None and time.monotonic() < until:
            try:
                answer = connection.ask(HELD)
            except DonorBusy:
                time.sleep(RETRY_S)
                continue
            if answer.status != 200:
                break
            held = shard_manifest.decode_held(connection.read(answer.length, shard_manifest.MAX_HELD_BYTES))
    except (OSError, ValueError, DataCorruption):
        held = None
    finally:
        connection.close()
        answers.put((address, held))
