"""`goodput`: the effective training time, predicted at published rates of failures, and measured in a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ft_hsdp.analysis import prediction
from ft_hsdp.config import Config
from ft_hsdp.errors import ConfigError
from ft_hsdp.launch.run.directory import DAMAGED, RunDir
from ft_hsdp.launch.run.page import recorded
from lighthouse.overview.overview import Overview
from lighthouse.runtime import about

SYSTEMS = Path(prediction.__file__).with_name("systems.json")
SHOWN = 5  # inputs of each rate in the text: those that matter most

Row = dict[str, Any]


def goodput(subject: Config | RunDir | None, phases: Path | None) -> Row:
    """Return the document of `goodput --json`.

    Args:
        subject: a job that is predicted, or a run that is measured, too; None: neither.
        phases: what `goodput RUN --json` printed of another run, whose phases count; None: this run's, or those of
            systems.json.

    Raises:
        ConfigError: ``phases`` is no such document, or nothing is recorded.
    """
    systems, given = json.loads(SYSTEMS.read_text(encoding="utf-8")), _phases(phases) if phases else None
    found: Row = {"measured": None, "predicted": None}
    name, ours = next(iter(systems["systems"].items()))
    if isinstance(subject, RunDir):
        rows, job = recorded(subject)
        overview = Overview(job)
        for entry in rows:
            overview.add(entry)
        own = prediction.settings(overview.goodput, overview.failures)
        found["measured"] = {**overview.effective(), "settings": own}
        found["predicted"] = asdict(overview.predict(given or own))
        given = given or own
    elif subject is not None:
        ours |= Overview(about(subject)).settings
        systems["rates"] = [{**rate, "replicas": ours["replicas"]} for rate in systems["rates"]]
    systems["systems"][name] = {**ours, **(given or {})}
    found["rates"] = [*prediction.rates(systems)]
    return {**found, "restart": prediction.restart_parts(systems), "settings": systems}


def _phases(file: Path) -> Row:
    try:
        row: Row = json.loads(file.read_text(encoding="utf-8"))["measured"]["settings"]
        prediction.system_of(row)
    except (OSError, *DAMAGED) as error:
        raise ConfigError("--phases", str(file), f"what `goodput RUN --json` prints ({error})") from None
    return row


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the document as text."""
    measured, predicted, rates = document["measured"], document["predicted"], document["rates"]
    if measured:
        both = [(each["useful_s"], each["lost_s"], predicted["wall_s"]) for each in (measured, predicted)]
        yield f"{'of the time since the first step':34}{'measured':>10}{'predicted':>11}"
        yield f"  {'trained':32}" + "".join(f"{useful / wall:>10.2%} " for useful, _, wall in both)
        for cause in sorted({*measured["lost_s"], *predicted["lost_s"]} - {"startup"}):
            yield f"  {cause:32}" + "".join(f"{lost.get(cause, 0.0) / wall:>10.2%} " for _, lost, wall in both)
        yield f"  {'slice efficiency':32}{measured['slice_efficiency']:>10.2%}\n"
    yield f"{f'simulated, {prediction.FAILURES} failures':28}" + "".join(
        f"{rate['name'][:17]:>18}" for rate in rates
    )
    yield f"{'seconds between failures':28}" + "".join(f"{rate['every_s']:>18,.0f}" for rate in rates)
    for name in rates[0]["systems"]:
        ratios = (rate["systems"][name] for rate in rates)
        yield f"{name:28}" + "".join(f"{each['useful_s'] / each['wall_s']:>18.2%}" for each in ratios)
    for rate in rates:
        yield f"\n{rate['name']}: points if an input is half of it, half as much again"
        most = sorted(rate["sensitivity"], key=lambda row: -max(abs(row["less"]), abs(row["more"])))
        yield from (f"  {r['input']:26}{100 * r['less']:>+8.2f}{100 * r['more']:>+8.2f}" for r in most[:SHOWN])
    yield f"\n{'what a restart is made of':28}{'FT-HSDP, Figure 2':>18}{'here':>18}"
    yield from (
        f"  {part['part']:26}{part['paper_s']:>16g} s{part['ours_s']:>16.2f} s" for part in document["restart"]
    )


def draw(document: Mapping[str, Any], out: Path) -> None:
    """Draw of what a restart is made into a file, with matplotlib, which must be there."""
    from matplotlib.figure import Figure

    parts, figure = document["restart"], Figure(figsize=(8, 2), layout="tight")
    titles = {"paper_s": "FT-HSDP, Figure 2, 98K GPUs", "ours_s": "here"}
    for axes, (key, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axes.barh([part["part"] for part in reversed(parts)], [part[key] for part in reversed(parts)])
        axes.set(title=title, xlabel="seconds")
    figure.savefig(out)
