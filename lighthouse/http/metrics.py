"""Metrics for Prometheus: what the journal's overview shows, and counts of requests, commits and failures.

docs/metrics.md names them. Labels are bounded: replicas, states, causes, routes, kinds of failures; any other
value is "other".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ft_hsdp.analysis.commits import EVAL_LOSS
from ft_hsdp.jsonl import is_finite
from lighthouse.http.access import Bearer, Keys
from lighthouse.journal.journal import JobJournal
from lighthouse.overview.machines import CLOCK, HOST, MEASURES
from lighthouse.overview.replicas import STATES

WAITS = ("quorum", "ftar", "snapshot", "copies", "commit", "offload", "evaluation")
ROUTES = (
    *("/v1/quorum", "/v1/processes", "/v1/telemetry", "/v1/status", "/v1/overview", "/v1/events", "/v1/stream"),
    *("/v1/diagnosis", "/v1/holders", "/metrics", "/healthz", "/"),
)
ENDLESS = ("/v1/stream",)
TOTALS = {  # by the field of a commit
    "tokens": ("ft_hsdp_tokens", "Tokens in committed steps"),
    "ftar_bytes": ("ft_hsdp_ftar_bytes", "Bytes that one rank sent through FTAR"),
    "copied_bytes": ("ft_hsdp_copied_bytes", "Bytes of shards that hosts copied from each other"),
    "ftar_s": ("ft_hsdp_ftar_seconds", "Time in which it did so"),
}
KIND = re.compile(r"SIG[A-Z0-9]{2,8}|exit \d{1,3}|[a-z][a-z ]{2,30}")
KINDS = 64
OTHER = "other"
STEP_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
RECOVERY_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
REQUEST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0)


class Meter:
    """Counts commits, failures and requests. It is a `Sink` of the journal."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(namespace="ft_hsdp_lighthouse", registry=registry)
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        recovery = partial(histogram, buckets=RECOVERY_S)
        self._commits = counter("ft_hsdp_commits", "Committed steps, those that were done again included")
        self._step_s = histogram("ft_hsdp_step_seconds", "Time from one commit to the next", buckets=STEP_S)
        self._totals = {name: counter(*told) for name, told in TOTALS.items()}
        self._waits = counter("ft_hsdp_exposed_wait_seconds", "Time that steps waited, by cause", ["cause"])
        self._dropped = counter("ft_hsdp_dropped_rows", "Rows that found no place while the lighthouse was away")
        self._failures = counter("ft_hsdp_failures", "Failures that are over", ["kind"])
        self._detect = recovery("ft_hsdp_detection_seconds", "From a failure to its first evidence")
        self._stall = recovery("ft_hsdp_stall_seconds", "What a failure cost the others' step")
        self._rejoin = recovery("ft_hsdp_rejoin_seconds", "From a failure until the replica contributes again")
        of_requests = "Requests that were answered", ["route", "code"]
        self._requests = counter("ft_hsdp_lighthouse_requests", *of_requests)
        text = "Time to the end of an answer; asks are long polls"
        self._request_s = histogram("ft_hsdp_lighthouse_request_seconds", text, ["route"], buckets=REQUEST_S)
        self._of_requests: dict[tuple[str, int], tuple[Counter, Histogram | None]] = {}  # by route and status
        for cause in (*WAITS, OTHER):
            self._waits.labels(cause)
        self._counted: set[int] = set()  # failures, by their numbers
        self._kinds: set[str] = set()
        self.checkpoint: Mapping[str, Any] | None = None  # the newest one that was written

    def take(self, kind: str, seq: int, row: Mapping[str, Any]) -> None:
        if row.get("event") == "CheckpointWritten":
            self.checkpoint = row
        elif row.get("event") == "RowsDropped":
            self._dropped.inc(_amount(row.get("rows")))
        if kind != "commit":
            return
        self._commits.inc()
        step_s = _amount(row.get("step_s"))
        if step_s > 0:
            self._step_s.observe(step_s)
        for name, total in self._totals.items():
            total.inc(_amount(row.get(name)))
        waits = row.get("waits")
        for cause, seconds in waits.items() if isinstance(waits, Mapping) else ():
            self._waits.labels(cause if cause in WAITS else OTHER).inc(_amount(seconds))

    def close(self) -> None: ...

    def settle(self, failures: Sequence[Mapping[str, Any]]) -> None:
        """Count each failure of an overview once, when it is over."""
        over = {f["seq"]: f for f in failures if f["done"]}
        for seq in sorted(over.keys() - self._counted):
            failure = over[seq]
            self._failures.labels(self._kind(failure["kind"])).inc()
            self._stall.observe(_amount(failure["stall_s"]))
            if failure["rejoin_s"] is not None:
                self._rejoin.observe(_amount(failure["rejoin_s"]))
            for phase in failure["phases"]:
                if phase["name"] == "detect":
                    self._detect.observe(_amount(phase["t1"] - phase["t0"]))
        self._counted = set(over)

    def request(self, path: str, code: int, seconds: float) -> None:
        """Count a request that was answered; the label of a path that is no route is "other"."""
        route = path if path in ROUTES else OTHER
        found = self._of_requests.get((route, code))
        if found is None:  # looked up once: this is on the way of every step
            timed = None if route in ENDLESS else self._request_s.labels(route)
            found = self._of_requests[route, code] = self._requests.labels(route, code), timed
        count, timed = found
        count.inc()
        if timed is not None:
            timed.observe(seconds)

    def _kind(self, kind: str) -> str:
        if kind not in self._kinds and (len(self._kinds) >= KINDS or not KIND.fullmatch(kind)):
            return OTHER
        self._kinds.add(kind)
        return kind


def _amount(value: object) -> float:
    """Return a number that can be added up; 0.0 for anything else."""
    return max(0.0, float(value)) if is_finite(value) else 0.0


class Scraped(Collector):
    """All metrics: the meter's, and those of the journal's overview at the time of the scrape."""

    def __init__(self, journal: JobJournal, meter: Meter) -> None:
        self._journal = journal
        self._meter = meter
        self._looked = False

    def collect(self) -> Iterator[Metric]:
        overview = self._journal.overview(points=2)
        self._meter.settle(overview["failures"])
        yield from self._meter.registry.collect()
        yield from _job(overview)
        yield from self._replicas(overview["replicas"])
        yield from _machines(overview)
        yield from self._checkpoint(overview["now"])

    def _replicas(self, replicas: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "ft_hsdp_replica_state", "1 for the state of a replica", labels=["replica", "state"]
        )
        age = GaugeMetricFamily("ft_hsdp_telemetry_age_seconds", "Since a replica was heard", labels=["replica"])
        for replica in replicas:
            for name in STATES:
                state.add_metric([str(replica["replica"]), name], replica["state"] == name)
            heard, ranks = self._journal.beat(replica["replica"])
            if ranks:
                age.add_metric([str(replica["replica"])], heard)
        yield state
        yield age
        for name, text in (
            ("step", "Newest step of a replica"),
            ("incarnations", "Starts of a replica"),
            ("width", "Ranks of a replica; fewer than it should have while a host is missing"),
            ("straggler", "1 for a replica that is slower than the others"),
            ("drained", "1 for a replica that an operator has taken out"),
        ):
            family = GaugeMetricFamily(f"ft_hsdp_replica_{name}", text, labels=["replica"])
            for replica in replicas:
                family.add_metric([str(replica["replica"])], _number(replica[name]))
            yield family

    def _checkpoint(self, now: float) -> Iterator[Metric]:
        """Yield the newest checkpoint; after a restart it is read from the journal."""
        if self._meter.checkpoint is None and not self._looked:
            self._looked = True
            found = self._journal.events(limit=1, event="CheckpointWritten")["events"]
            self._meter.checkpoint = {**found[-1], **found[-1]["facts"]} if found else None
        row = self._meter.checkpoint
        if row is not None:
            yield GaugeMetricFamily(
                "ft_hsdp_checkpoint_step", "Step of the newest checkpoint", _number(row["step"])
            )
            age = max(0.0, now - row["t"])
            yield GaugeMetricFamily("ft_hsdp_checkpoint_age_seconds", "Since it was written", age)


def _job(overview: Mapping[str, Any]) -> Iterator[Metric]:
    job, head, lighthouse = overview["job"], overview["head"], overview["lighthouse"]
    evaluated = overview["logged"].get(EVAL_LOSS, {"value": [None]})["value"]
    for name, text, value in (
        ("step", "Newest committed step", head["step"]),
        ("target_steps", "Steps of the whole job", job["steps"]),
        ("loss", "Loss of the newest step", head["loss"]),
        (EVAL_LOSS, "Loss of the newest evaluation", evaluated[-1]),
        ("learning_rate", "Learning rate of the newest step", head["lr"]),
        ("learning_rate_scale", "Its part that follows from units per wanted units", head["lr_scale"]),
        ("replicas", "Replicas of the job", job["total"]),
        ("healthy_replicas", "Replicas that contributed to the newest step", head["healthy"]),
        ("units", "Units in the newest step", head["units"]),
        ("units_wanted", "Units of a step to which all replicas contribute", head["units_wanted"]),
        ("epoch", "Newest membership that was granted", lighthouse["epoch"]),
        ("term", "Leadership of this lighthouse", lighthouse["term"]),
        ("finished", "1 once the job has its final state", job["finished"]),
        ("halted", "1 if the job cannot go on", bool(job["halted"])),
        ("protected", "1 if no single lost host takes a shard of the newest state with it", _protected(job)),
        ("copies", "Hosts apart that each shard of the newest state is on, at least", job["protection"]["copies"]),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"ft_hsdp_{name}", text, _number(value))
    ratio = GaugeMetricFamily("ft_hsdp_effective_training_ratio", "Part of the time that trained", labels=["by"])
    for by in ("wall_clock", "renewal", "with_replay"):
        if overview["effective"][by] is not None:
            ratio.add_metric([by], overview["effective"][by])
    yield ratio
    lost = GaugeMetricFamily("ft_hsdp_lost_seconds", "Time that did not train, by cause", labels=["cause"])
    for cause, seconds in overview["effective"]["lost_s"].items():
        lost.add_metric([cause], seconds)
    yield lost
    yield CounterMetricFamily("ft_hsdp_journal_rows", "Rows that the journal was given", overview["seq"])


def _machines(overview: Mapping[str, Any]) -> Iterator[Metric]:
    ranks = [(str(row["replica"]), rank) for row in overview["replicas"] for rank in row["ranks"]]
    told = [([replica, str(rank["rank"]), rank["host"]], rank["load"]) for replica, rank in ranks]
    told += [([host], load) for host, load in overview["loads"].items()]
    texts = {**MEASURES, CLOCK: "By how much the host's clock is ahead of the lighthouse's"}
    for name, text in texts.items():
        labels = ["host"] if name.startswith(HOST) else ["replica", "rank", "host"]
        family = GaugeMetricFamily(f"ft_hsdp_{name}", text, labels=labels)
        for where, load in told:
            if name in load:
                family.add_metric(where, load[name])
        yield family


def _protected(job: Mapping[str, Any]) -> bool | None:
    """Return whether the newest state is protected; None: no replica that is left has said it."""
    word = job["protection"]["word"]
    return word == "protected" if word else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, bool | int | float) else math.nan


def metrics(journal: JobJournal, meter: Meter, keys: Keys) -> APIRouter:
    """Return the route GET /metrics, for viewers: the text format or OpenMetrics, as the scraper asks."""
    scraped = Scraped(journal, meter)
    router = APIRouter()

    @router.get("/metrics", dependencies=[Depends(Bearer(keys, "viewer"))], response_class=Response)
    async def scrape(request: Request) -> Response:
        """All metrics of the job and of this lighthouse."""
        await journal.ready()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(scraped), headers={"Content-Type": media_type})

    return router
