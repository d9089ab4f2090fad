from typing import Any

from ft_hsdp.analysis.commits import MAX_VALUES
from lighthouse.overview.series import POINTS, LoggedCurves


def row(t: float, step: int, epoch: int = 1, **values: float | None) -> dict[str, Any]:
    return {"t": t, "step": step, "epoch": epoch, "values": values}


def test_each_name_is_a_curve() -> None:
    curves = LoggedCurves()
    curves.add(row(1.0, 10, loss=2.0, accuracy=0.5))
    curves.add(row(2.0, 20, loss=1.0, accuracy=None))
    assert curves.between(0.0, 9.0, 100) == {
        "accuracy": {"t": [1.0], "step": [10], "value": [0.5]},
        "loss": {"t": [1.0, 2.0], "step": [10, 20], "value": [2.0, 1.0]},
    }
    assert curves.between(1.5, 9.0, 100) == {"loss": {"t": [2.0], "step": [20], "value": [1.0]}}


def test_a_step_that_is_done_again_replaces_its_values() -> None:
    curves = LoggedCurves()
    for step in (10, 20, 30):
        curves.add(row(float(step), step, loss=float(step)))
    curves.add(row(40.0, 20, epoch=2, loss=7.0))
    assert curves.between(0.0, 99.0, 100)["loss"]["step"] == [10, 20]
    curves.add(row(41.0, 10, epoch=2, loss=8.0))
    assert curves.between(0.0, 99.0, 100)["loss"]["step"] == [10, 20, 10], "a late value of the same history stays"


def test_points_and_names_are_bounded() -> None:
    curves, rows = LoggedCurves(), 10 * POINTS
    for step in range(rows):
        curves.add(row(float(step), step, loss=1.0))
        curves.add({**row(float(step), step), "values": {f"n{step}": 1.0}})
    shown = curves.between(0.0, rows, rows)
    assert len(shown) == MAX_VALUES
    assert POINTS <= len(shown["loss"]["t"]) < 2 * POINTS
    assert shown["loss"]["step"][0] == 0
    assert len(curves.between(0.0, rows, 5)["loss"]["t"]) <= 10
    few = LoggedCurves()
    for step in range(4):
        few.add(row(float(step), step, loss=1.0))
    assert few.between(0.0, 9.0, 2)["loss"]["step"] == [1, 3], "the newest one is there"
