"""A lighthouse with every metric: a journal that is told what to show, a meter, and the real route."""

import asyncio
import copy
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from ft_hsdp.protocol import RankBeat
from lighthouse.http.access import Keys, view_key
from lighthouse.http.metrics import Meter, metrics
from lighthouse.http.quorum_route import QuorumRoute

TOKEN = "ab" * 32

FAILURE = {
    "seq": 7,
    "replica": 1,
    "rank": 0,
    "kind": "SIGKILL",
    "t": 100.0,
    "cause": "chaos",
    "phases": [{"name": "detect", "t0": 100.0, "t1": 100.04}, {"name": "boot", "t0": 100.1, "t1": 101.0}],
    "stall_s": 0.3,
    "rejoin_s": 2.5,
    "done": True,
}

OVERVIEW: dict[str, Any] = {
    "now": 1000.0,
    "seq": 41,
    "job": {
        "name": "run",
        "started": 1.0,
        "ended": None,
        "total": 2,
        "ranks": 2,
        "steps": 70,
        "finished": False,
        "halted": "",
        "protection": {"word": "protected", "why": "", "copies": 2, "apart": "host"},
        "live": True,
    },
    "lighthouse": {"term": 3, "epoch": 5, "since": 1.0, "outages": []},
    "head": {
        "step": 12,
        "epoch": 5,
        "loss": 2.5,
        "lr": 0.25,
        "lr_scale": 0.5,
        "step_s": 1.0,
        "steps_per_s": 1.0,
        "tokens_per_s": 100.0,
        "contributors": [0],
        "total": 2,
        "healthy": 1,
        "units": 10,
        "units_wanted": 12,
    },
    "effective": {
        "wall_clock": 0.75,
        "renewal": 0.875,
        "with_replay": 0.5,
        "wall_s": 100.0,
        "useful_s": 75.0,
        "lost_s": {"startup": 4.0, "ftar": 1.5},
    },
    "replicas": [
        {
            "replica": 0,
            "state": "training",
            "step": 12,
            "incarnations": 1,
            "width": 2,
            "straggler": False,
            "drained": False,
        },
        {
            "replica": 1,
            "state": "booting",
            "step": 9,
            "incarnations": 4,
            "width": 2,
            "straggler": True,
            "drained": True,
        },
    ],
    "failures": [FAILURE],
}


class ShownJournal:
    def __init__(self) -> None:
        self.shown = copy.deepcopy(OVERVIEW)
        self.written = [{"seq": 3, "t": 940.0, "event": "CheckpointWritten", "facts": {"step": 10}}]
        self.asked = 0

    async def ready(self) -> None:
        pass

    def overview(self, *, points: int = 600) -> dict[str, Any]:
        return self.shown

    def events(self, **asked: Any) -> dict[str, Any]:
        self.asked += 1
        assert asked["event"] == "CheckpointWritten"
        return {"events": self.written[-asked["limit"] :]}

    def beat(self, replica: int) -> tuple[float, tuple[RankBeat, ...]]:
        return (0.5, (RankBeat(0, 7, "here", 3),)) if replica == 0 else (1e9, ())


class Scene:
    journal: Any  # shows what the metrics ask of a `JobJournal`

    def __init__(self, journal: Any = None, meter: Meter | None = None) -> None:
        self.journal = journal or ShownJournal()
        self.meter = meter or Meter()
        self.app = FastAPI()
        self.app.include_router(metrics(self.journal, self.meter, Keys(TOKEN)))

    def get(self, path: str = "/metrics", token: str = view_key(TOKEN), **headers: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            no_service: Any = None  # the scraper does not ask for a step
            app: Any = QuorumRoute(self.app, no_service, no_service, self.meter.request)
            through = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=through, base_url="http://lighthouse") as client:
                return await client.get(path, headers={"Authorization": f"Bearer {token}", **headers})

        return asyncio.run(ask())

    def text(self) -> str:
        answer = self.get()
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def families(self) -> dict[str, Any]:
        return {family.name: family for family in text_string_to_metric_families(self.text())}

    def values(self) -> dict[str, float]:
        """Every sample of a scrape: ``name{label,label}`` to its value."""
        found = {}
        for family in self.families().values():
            for sample in family.samples:
                labels = ",".join(str(value) for value in sample.labels.values())
                found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return found
