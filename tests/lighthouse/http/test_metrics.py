from __future__ import annotations

import asyncio
import copy
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from ft_hsdp.protocol import RankBeat, Telemetry
from lighthouse.http.access import Keys, view_key
from lighthouse.http.metrics import KINDS, Meter, metrics
from lighthouse.http.quorum_route import QuorumRoute
from lighthouse.journal.database import MemoryDatabase
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.machines import CLOCK, MEASURES, split
from lighthouse.overview.overview import JobInfo
from lighthouse.overview.replicas import STATES

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

OWN, OF_HOST = split({name: float(number) for number, name in enumerate(MEASURES)})
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
    "logged": {"eval_loss": {"t": [900.0, 950.0], "step": [5, 10], "value": [2.875, 2.75]}},
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
            "ranks": [{"rank": 1, "host": "here", "load": OWN}],
        },
        {
            "replica": 1,
            "state": "booting",
            "step": 9,
            "incarnations": 4,
            "width": 2,
            "straggler": True,
            "drained": True,
            "ranks": [],
        },
    ],
    "loads": {"here": OF_HOST, "there": {CLOCK: 2.5}},
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


def commit(**other: Any) -> dict[str, Any]:
    figures = {"step_s": 0.5, "tokens": 100, "ftar_bytes": 1000, "ftar_s": 0.25}
    return {**figures, "waits": {"quorum": 0.0, "ftar": 0.125, "commit": 0.0625}, **other}


@pytest.fixture
def s() -> Scene:
    return Scene()


def test_the_overview_is_in_gauges() -> None:
    values = Scene().values()
    expected = {
        "step": 12,
        "target_steps": 70,
        "loss": 2.5,
        "eval_loss": 2.75,
        "learning_rate": 0.25,
        "learning_rate_scale": 0.5,
        "replicas": 2,
        "healthy_replicas": 1,
        "units": 10,
        "units_wanted": 12,
        "epoch": 5,
        "term": 3,
        "finished": 0,
        "halted": 0,
        "protected": 1,
        "copies": 2,
        "effective_training_ratio{wall_clock}": 0.75,
        "effective_training_ratio{renewal}": 0.875,
        "effective_training_ratio{with_replay}": 0.5,
        "lost_seconds{startup}": 4,
        "lost_seconds{ftar}": 1.5,
        "journal_rows_total": 41,
        "replica_step{1}": 9,
        "replica_incarnations{1}": 4,
        "replica_width{0}": 2,
        "replica_straggler{0}": 0,
        "replica_straggler{1}": 1,
        "replica_drained{1}": 1,
        **{f"replica_state{{0,{state}}}": state == "training" for state in STATES},
        **{f"replica_state{{1,{state}}}": state == "booting" for state in STATES},
        "telemetry_age_seconds{0}": 0.5,
        "rank_resident_bytes{here,1,0}": 1,
        "host_memory_bytes{here}": [*MEASURES].index("host_memory_bytes"),
        "host_clock_ahead_seconds{there}": 2.5,
        "checkpoint_step": 10,
        "checkpoint_age_seconds": 60,
    }
    assert {name: values[f"ft_hsdp_{name}"] for name in expected} == expected
    assert "ft_hsdp_telemetry_age_seconds{1}" not in values, "nobody has heard of it"


def test_what_is_not_known_yet_is_not_shown(s: Scene) -> None:
    s.journal.written = []
    s.journal.shown["head"]["loss"] = None
    s.journal.shown["effective"]["renewal"] = None
    values = s.values()
    assert "ft_hsdp_loss" not in values
    assert "ft_hsdp_effective_training_ratio{renewal}" not in values
    assert "ft_hsdp_checkpoint_step" not in values
    s.values()
    assert s.journal.asked == 1, "the journal is asked once"


def test_commits_are_counted(s: Scene) -> None:
    for seq in range(3):
        s.meter.take("commit", seq, commit())
    s.meter.take("commit", 4, commit(waits={"offload": 2.0, "surprise": 3.0}))
    values = s.values()
    expected = {
        "commits_total": 4,
        "step_seconds_count": 4,
        "step_seconds_sum": 2.0,
        "step_seconds_bucket{0.25}": 0,
        "step_seconds_bucket{0.5}": 4,
        "tokens_total": 400,
        "ftar_bytes_total": 4000,
        "ftar_seconds_total": 1.0,
        "exposed_wait_seconds_total{quorum}": 0,
        "exposed_wait_seconds_total{ftar}": 0.375,
        "exposed_wait_seconds_total{commit}": 0.1875,
        "exposed_wait_seconds_total{offload}": 2.0,
        "exposed_wait_seconds_total{other}": 3.0,
    }
    assert {name: values[f"ft_hsdp_{name}"] for name in expected} == expected


@pytest.mark.parametrize("odd", [None, "x", math.nan, math.inf, -1.0, True, [], {}, {"ftar": "x"}])
def test_figures_that_are_none_count_nothing(s: Scene, odd: Any) -> None:
    s.meter.take("commit", 1, {"step_s": odd, "tokens": odd, "ftar_bytes": odd, "ftar_s": odd, "waits": odd})
    values = s.values()
    assert values["ft_hsdp_commits_total"] == 1
    for name in ("tokens_total", "ftar_bytes_total", "step_seconds_count"):
        assert values[f"ft_hsdp_{name}"] == 0


def test_the_journal_that_comes_with_it_shows_all_of_it() -> None:
    meter = Meter()
    journal = JobJournal(MemoryDatabase(), JobInfo("run", 2, 1, 70), [meter])
    s = Scene(journal, meter)
    assert s.values()["ft_hsdp_commits_total"] == 0, "nothing has happened yet"
    now = time.time()
    row = {**commit(), "t": now, "step": 1, "epoch": 1, "attempt": 0, "contributors": [0, 1], "loss": 2.5}
    row |= {"lineage": "ab", "role": "contribute", "lr": 0.1, "lr_scale": 1.0, "total": 2}
    written = {"t": now, "event": "CheckpointWritten", "step": 1, "reason": ""}
    journal.take(Telemetry("0-x-0", (written,), (row,), (RankBeat(0, 7, "here", 3),), 5))
    journal.note([{"t": now, "event": "EpochGranted", "epoch": 4, "members": [0, 1], "step": 1, "reason": ""}])
    values = s.values()
    expected = {"commits_total": 1, "loss": 2.5, "epoch": 4, "checkpoint_step": 1, "dropped_rows_total": 5}
    assert {name: values[f"ft_hsdp_{name}"] for name in expected} == expected
    assert "ft_hsdp_telemetry_age_seconds{0}" in values
    journal.close()


def test_a_failure_counts_once_when_it_is_over(s: Scene) -> None:
    s.journal.shown["failures"] = [{**FAILURE, "done": False, "rejoin_s": None}]
    assert "ft_hsdp_failures_total{SIGKILL}" not in s.values()
    s.journal.shown["failures"] = [FAILURE, {**FAILURE, "seq": 9, "rejoin_s": None, "phases": []}]
    first = s.values()
    values = s.values()
    assert values["ft_hsdp_failures_total{SIGKILL}"] == first["ft_hsdp_failures_total{SIGKILL}"]
    expected = {
        "failures_total{SIGKILL}": 2,
        "detection_seconds_count": 1,
        "detection_seconds_bucket{0.025}": 0,
        "detection_seconds_bucket{0.05}": 1,
        "stall_seconds_count": 2,
        "stall_seconds_sum": 0.6,
        "rejoin_seconds_count": 1,
        "rejoin_seconds_sum": 2.5,
    }
    assert {name: values[f"ft_hsdp_{name}"] for name in expected} == expected


def test_labels_stay_bounded_whatever_workers_say(s: Scene) -> None:
    odd = ["x" * 1000, 'a"} 1\nevil', "exit 1234567", "", "SIG\u0661"]
    kinds = [*odd, *(f"exit {n}" for n in range(200))]
    s.journal.shown["failures"] = [{**FAILURE, "seq": n, "kind": kind} for n, kind in enumerate(kinds)]
    failures = s.families()["ft_hsdp_failures"].samples
    assert len(failures) == KINDS + 1
    assert sum(f.value for f in failures) == len(kinds)
    for n in range(50):
        s.get(f"/{n}")
    routes = {sample.labels["route"] for sample in s.families()["ft_hsdp_lighthouse_requests"].samples}
    assert routes == {"/metrics", "other"}


def test_requests_are_counted_and_timed(s: Scene) -> None:
    s.get()
    s.get(token="wrong")
    s.get("/v1/nothing")
    shown, s.journal.shown = s.journal.shown, {}
    assert s.get().status_code == 500
    s.journal.shown = shown
    values = s.values()
    expected = {"{200,/metrics}": 1, "{401,/metrics}": 1, "{404,other}": 1, "{500,/metrics}": 1}
    assert {name: values[f"ft_hsdp_lighthouse_requests_total{name}"] for name in expected} == expected
    assert values["ft_hsdp_lighthouse_request_seconds_count{/metrics}"] == 3


def test_the_scraper_chooses_the_format(s: Scene) -> None:
    plain = s.get()
    assert plain.headers["content-type"].startswith("text/plain; version=")
    new = s.get(Accept="application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.1")
    assert new.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert new.text.endswith("# EOF\n")


# docs/metrics.md and the Grafana dashboard name what /metrics really shows.


ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/metrics.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana/ft_hsdp.json").read_text())
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def described() -> dict[str, tuple[str, frozenset[str]]]:
    """Name to type and labels, from the tables of the page."""
    rows = re.findall(r"^\| `(ft_hsdp_\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == len(rows), "a metric is described twice"
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


@pytest.fixture(scope="module")
def real() -> dict[str, tuple[str, frozenset[str]]]:
    """Name to type and labels, from a scrape that has them all."""
    scene = Scene()
    scene.get()
    found = {}
    for family in scene.families().values():
        assert family.samples, f"{family.name} has no sample in the scene"
        assert family.documentation
        labels = {frozenset(s.labels) - {"le"} for s in family.samples}
        assert len(labels) == 1
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, labels.pop())
    return found


def test_the_page_describes_every_metric_and_no_other(real) -> None:
    assert described() == real


def test_labels_are_the_bounded_ones(real) -> None:
    allowed = {"replica", "rank", "host", "state", "cause", "by", "kind", "route", "code"}
    assert set().union(*(labels for _, labels in real.values())) <= allowed


def expressions(value: object) -> Iterator[str]:
    """Every PromQL expression inside a document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("expr", "definition") and isinstance(inner, str):
                yield inner
            else:
                yield from expressions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from expressions(inner)


def alarms() -> list[str]:
    """The expressions of the page's rules."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return [e for block in blocks for e in expressions(yaml.safe_load(block))]


def check(expression: str, real: dict[str, tuple[str, frozenset[str]]]) -> None:
    series = {name + suffix: labels for name, (kind, labels) in real.items() for suffix in SUFFIXES[kind]}
    named = re.findall(r"(ft_hsdp_\w+)(?:\{([^}]*)\})?", expression)
    assert named, expression
    for name, selector in named:
        assert name in series, f"{name} in {expression}"
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels <= {"job", *series[name]}, f"{labels} in {expression}"
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        known = {"le"}.union(*(series[name] for name, _ in named))
        assert {word.strip() for word in grouped.split(",")} <= known, expression
    assert expression.count("(") == expression.count(")")


@pytest.mark.parametrize(("asked", "least"), [([*expressions(DASHBOARD)], 26), (alarms(), 6)])
def test_the_dashboard_and_the_alarms_ask_for_metrics_that_exist(asked: list[str], least: int, real) -> None:
    assert len(asked) >= least
    for expression in asked:
        check(expression, real)


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["schemaVersion"] >= 39
    assert [(i["name"], i["pluginId"]) for i in DASHBOARD["__inputs"]] == [("DS_PROMETHEUS", "prometheus")]
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    required = {(r["type"], r["id"]) for r in DASHBOARD["__requires"]}
    for panel in panels:
        assert ("panel", panel["type"]) in required
        assert {t["datasource"]["uid"] for t in panel["targets"]} == {"${DS_PROMETHEUS}"}


def test_the_curves_that_are_named_are_written() -> None:
    from lighthouse.journal.exporters import Point

    row = {"t": 1.0, "step": 1, "contributors": [0], "loss": 1.0, "lr": 1.0, "lr_scale": 1.0, "step_s": 1.0}
    curves = Point.of(1, {**row, "ftar_bytes": 1, "ftar_s": 1.0, "tokens": 1}).values
    assert all(f"`{name}`" in PAGE for name in curves)
