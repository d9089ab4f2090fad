import asyncio
from types import SimpleNamespace

from ft_hsdp.config import parse
from ft_hsdp.launch.backend import spare_agents
from ft_hsdp.launch.backend.spare_agents import SpareAgents
from ft_hsdp.launch.run.directory import Row


async def test_one_that_ends_at_once_is_started_again_after_pauses_that_double(run_dir, monkeypatch) -> None:
    now, starts = [1000.0], [0]
    events: list[Row] = []
    agents = SpareAgents(parse({"hosts": {"per_replica": 2, "spare": 2}}), run_dir, events.append)

    async def start(_: str) -> asyncio.subprocess.Process:
        starts[0] += 1
        return await asyncio.create_subprocess_exec("/bin/false")

    monkeypatch.setattr(agents, "_start", start)
    monkeypatch.setattr(spare_agents, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))

    async def look() -> int:
        await agents.ensure(["s0"])
        for process in agents._waiting.values():
            await process.wait()
        return starts[0]

    assert [await look() for _ in range(5)] == [1, 1, 1, 1, 1]
    for pause_s, number in ((1, 2), (2, 3), (4, 4)):
        now[0] += pause_s - 0.01
        assert await look() == number - 1
        now[0] += 0.02
        assert await look() == number
    assert [(e["event"], e["host"]) for e in events] == [("SpareLost", "s0")]
    assert events[0]["reason"].startswith("exit 1; ")
    await agents.ensure(["s1"])
    assert starts[0] == 5, "another host has pauses of its own"
    now[0] += 61
    assert await look() == 6
    assert [e["host"] for e in events] == ["s0", "s0"], "it had lasted: the count begins anew"
    await agents.close()
