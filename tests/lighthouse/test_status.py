"""The word that people see for each replica."""

from __future__ import annotations

import asyncio

from ft_hsdp.protocol import ProcessReport
from tests.support.lighthouse.lighthouse_helpers import ask, at, granted, make_service, name, quiet


async def test_status_names_every_state():
    service, _ = make_service(total=7, steps=3)
    running: dict[int, str | None] = {0: name(0), 1: name(1), 2: name(2), 3: name(3), 4: name(4)}
    service.processes(ProcessReport(running | {5: None}, (), (6,)))
    service.processes(ProcessReport({2: None, 3: None, 4: None}))
    await granted(service, 0, 1)
    service.processes(ProcessReport(running))
    joiner = asyncio.create_task(service.ask(ask(2)))
    await quiet()
    await service.ask(ask(0, at(1, 1), epoch=1))
    await joiner
    waiting = asyncio.create_task(service.ask(ask(3)))
    await quiet()
    status = service.status()
    assert {k: status[k] for k in ("job", "epoch", "step", "finished", "members")} == {
        "job": "job",
        "epoch": 2,
        "step": 1,
        "finished": False,
        "members": [0, 1, 2],
    }
    states = [r["state"] for r in status["replicas"]]
    assert states == ["training", "training", "behind", "asking", "booting", "down", "lost"]
    assert all(r["reason"] for r in status["replicas"])
    assert status["replicas"][0]["incarnation"] == name(0)
    assert status["replicas"][0]["step"] == 1
    final = asyncio.create_task(service.ask(ask(0, at(2, 3), epoch=2)))
    await quiet()
    assert service.status()["replicas"][0]["state"] == "final"
    for task in (waiting, final):
        task.cancel()
    service.close()
