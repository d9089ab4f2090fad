"""The agent of a host, beside a made-up lighthouse and a real fork server or holder."""

import asyncio
import os
import secrets
from typing import Any

import httpx

from ft_hsdp import protocol
from ft_hsdp.config import parse
from ft_hsdp.control.lighthouse_client import LighthouseClient
from ft_hsdp.core.host_report import AssignedRanks, HostRanks, HostReport
from ft_hsdp.launch.agent import HostAgent, agent_path
from ft_hsdp.launch.backend.forkserver import ForkServer
from ft_hsdp.launch.backend.held import HeldForks
from ft_hsdp.launch.backend.ranks import LocalRanks
from ft_hsdp.launch.run.directory import Row, RunDir
from ft_hsdp.protocol import ProcessReport, SupervisorReply
from ft_hsdp.secret import write_private
from tests.support.waiting import async_until

STANDIN = "tests.support.launch.standin:main"


class Scene:
    """An agent, and its lighthouse: that keeps a report open until it has another answer than the last one."""

    def __init__(
        self,
        run: RunDir,
        replica: int | None = None,
        forks: HeldForks | None = None,
        before: "Scene | None" = None,
        **settings: Any,
    ) -> None:
        """Begin, or go on with the same lighthouse as another agent ``before``."""
        self.run, self.reports, self.down, self.open = run, list[HostReport](), False, 0
        self.events = list[Row]()
        self.reply = SupervisorReply(0, False, seen="0") if before is None else before.reply
        self._changed = asyncio.Event()
        job = {"name": "job", "runs_dir": str(run.path.parent)}
        config = parse({"job": job, "timeouts": {"stop_s": 1.0}, **settings})
        if not run.token.exists():
            write_private(run.token, secrets.token_hex(32))
        self.forks = forks or ForkServer(run.path, entry=STANDIN, preload=())
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        client = LighthouseClient(("http://127.0.0.1:1",), "s", http=http)
        path = agent_path(config, os.environ, replica)
        spares = None if replica is None else run.replica(replica) / "spares"
        self.ranks = LocalRanks(config, run, self.forks, gpus="AB", spares=spares, emit=self.events.append)
        self.agent = HostAgent(config, run, self.ranks, client, path, replica=replica, emit=self.events.append)
        if forks is not None:
            self.agent.resume(forks.told, forks.watch)
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> int:
        self.ranks.file.write_text("{}")
        try:
            return await self.agent.run()
        finally:
            await self.ranks.close()

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        if self.down:
            raise httpx.ConnectError("down")
        report = protocol.decode(request.content, ProcessReport).host
        assert report is not None
        self.reports.append(report)
        self.open += 1
        try:
            while report.seen == self.reply.seen:
                await self._changed.wait()
        finally:
            self.open -= 1
        return httpx.Response(200, content=protocol.encode(self.reply))

    def answers(self, *assigned: AssignedRanks, **more: Any) -> None:
        seen = str(int(self.reply.seen) + 1)
        self.reply = SupervisorReply(0, **{"finished": False, **more}, assigned=assigned, seen=seen)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        """Of the newest answer."""
        return int(self.reply.seen)

    def assigned(self, name: str, *ranks: int, of: int = 2, **more: Any) -> AssignedRanks:
        return AssignedRanks(name, ranks, ("h",) * of, self.reports[-1].address, **more)

    def of(self, name: str) -> HostRanks | None:
        """What the newest report says of an incarnation."""
        return next((ranks for ranks in self.reports[-1].ranks if ranks.incarnation == name), None)

    async def reported(self, name: str, living: tuple[int, ...], *ended: tuple[int, int, bool]) -> HostRanks:
        def fits() -> HostRanks | None:
            said = self.of(name)
            fit = said and said.living == living and {(e.rank, e.code, e.killed) for e in said.ended} == {*ended}
            return said if fit else None

        found = await async_until(fits, f"{name}: {living}, {ended}", said=lambda: str(self.reports[-1]))
        assert found is not None
        return found

    async def waiting(self, *names: str) -> None:
        """Wait until these ranks run, by REPLICA-RESTART-RANK."""
        for name in names:
            await async_until((self.run.path / f"waiting-{name}").exists, f"rank {name}")
