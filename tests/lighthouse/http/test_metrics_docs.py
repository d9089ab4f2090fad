"""docs/metrics.md and the Grafana dashboard name what /metrics really shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.lighthouse.metrics_scene import Scene

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
    allowed = {"replica", "state", "cause", "by", "kind", "route", "code"}
    assert set().union(*(labels for _, labels in real.values())) <= allowed


def test_names_follow_the_convention(real) -> None:
    for name, (kind, _) in real.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|millis|minutes|kb|mb|percent)\b", name), name


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


def test_the_dashboard_asks_for_metrics_that_exist(real) -> None:
    asked = list(expressions(DASHBOARD))
    assert len(asked) > 25
    for expression in asked:
        check(expression, real)


def test_the_alarms_are_about_metrics_that_exist(real) -> None:
    asked = alarms()
    assert len(asked) == 5
    for expression in asked:
        check(expression, real)


def test_a_metric_that_does_not_exist_would_be_found(real) -> None:
    for wrong in ("rate(ft_hsdp_steps[5m])", "ft_hsdp_step_seconds", 'ft_hsdp_step{replica="1"}', "up"):
        with pytest.raises(AssertionError):
            check(wrong, real)


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
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie over each other"


def test_the_curves_that_are_named_are_written() -> None:
    from lighthouse.journal.exporters import Point

    row = {"t": 1.0, "step": 1, "contributors": [0], "loss": 1.0, "lr": 1.0, "lr_scale": 1.0, "step_s": 1.0}
    curves = Point.of(1, {**row, "ftar_bytes": 1, "ftar_s": 1.0, "tokens": 1}).values
    assert all(f"`{name}`" in PAGE for name in curves)
