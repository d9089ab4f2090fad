"""Random events between light members: no hang, no wrong sum, nothing left over (see `storm`)."""

from pathlib import Path

import pytest

from tests.ftar.storm import Storm


@pytest.mark.multiproc
@pytest.mark.parametrize("events", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_a_storm_leaves_no_hang_no_wrong_sum_and_nothing_behind(tmp_path: Path, events: int) -> None:
    storm = Storm(seed=7, folder=tmp_path)
    try:
        storm.run(events)
    finally:
        storm.close()
        print(storm.report())
    assert storm.happened.total() == events
    assert storm.seconds["kill to raise"], "nobody was killed"
    assert storm.happened["hurt"], "no connection was hurt"
