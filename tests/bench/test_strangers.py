"""The strangers of `bench strangers`, against a gate; and how a result is shown."""

from __future__ import annotations

import asyncio
import io
from typing import Any

from ft_hsdp import address
from ft_hsdp.bench import goals
from ft_hsdp.bench.goals import begin_result, finish_result
from ft_hsdp.bench.results import ProgressLog
from ft_hsdp.bench.strangers import Flood, frames
from ft_hsdp.bench.tables import show
from ft_hsdp.caller_gate import CallerGate
from ft_hsdp.handshake import Purpose
from ft_hsdp.protocol import MAX_MESSAGE


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


def test_the_frames_are_what_they_are_said_to_be() -> None:
    big, proof, request, noise, silence = frames()
    assert MAX_MESSAGE - 400 < len(big) <= MAX_MESSAGE + 4
    assert (len(proof), len(noise), silence) == (69, 4096, b"")
    assert request.endswith(b"\r\n\r\n")


def test_a_result_is_shown_beside_its_goals() -> None:
    result, started = begin_result("strangers", ProgressLog(io.StringIO()))
    steps = {"p50_ms": 100.0, "min_ms": 90.0, "max_ms": 140.0, "count": 40}
    row = {
        "replicas": 3,
        "ranks": 2,
        "per_s": 1000,
        "listeners": {"ring doors": 6, "agents": 3},
        "calls": {"sink": 900, "job": 1000},
        "refused": 0,
        "steps": {"sink": steps, "job": steps},
        "times": {"ratio": 1.2, "low": 1.0, "high": 1.3},
        "rings_broken": 0,
        "processes": 15,
        "processes_gone": 0,
        "growth_mib": 4.7,
    }
    result["strangers"] = [row]
    assert [verdict.met for verdict in goals.strangers(result)] == [False, True, True]
    stream = io.StringIO()
    show("strangers", finish_result(result, ProgressLog(io.StringIO()), started), stream)
    assert "6 ring doors, 3 agents" in stream.getvalue()
