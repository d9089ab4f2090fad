"""Many strangers at the gates of listeners."""

import asyncio
from typing import Any

from ft_hsdp import address
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.handshake import Purpose
from tests.support.flood import Flood, frames


async def test_strangers_call_each_listener_with_each_frame_and_nobody_is_let_in() -> None:
    admitted: list[Any] = []
    gates = [CallerGate("ab" * 32, (Purpose.RING,), lambda *who: admitted.append(who)) for _ in range(2)]
    targets = []
    for gate in gates:
        listener = address.bound("127.0.0.1")
        gate.watch(listener)
        targets.append(address.join("127.0.0.1", listener.getsockname()[1]))
    try:
        with Flood(targets) as flood:
            while flood.sent < 10 * len(frames()):  # noqa: ASYNC110 - it counts on a thread
                await asyncio.sleep(0.01)
        assert (admitted, flood.refused) == ([], 0)
        # The count of callers begins anew with each line of the log, so it may be 0.
        assert all(gate._told > 0 for gate in gates), "a gate was not called"
    finally:
        for gate in gates:
            gate.close()
