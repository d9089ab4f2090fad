"""Forty random events between light members: no hang, no wrong sum, nothing left over (see `storm`)."""

from pathlib import Path

import pytest
from storm import Storm

EVENTS = 40


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_storm_leaves_no_hang_no_wrong_sum_and_nothing_behind(tmp_path: Path) -> None:
    storm = Storm(seed=7, folder=tmp_path)
    try:
        storm.run(EVENTS)
    finally:
        storm.close()
        print(storm.report())
    assert storm.happened.total() == EVENTS
    assert storm.seconds["kill to raise"], "nobody was killed"
    assert storm.happened["hurt"], "no connection was hurt"
