"""Whether the clocks of hosts are right: of many signs of life the one with the least delay counts."""

import pytest

from ft_hsdp.protocol import RankBeat
from lighthouse.overview.machines import LEAST, SILENT_S, WINDOW_S, Clocks

START = 1.7e9


def heard(clocks: Clocks, ahead_s: float, *delays: float, since: float = 0.0, host: str = "h") -> list[object]:
    """What is told of a host whose signs of life, one in 3 s, are delayed."""
    told = []
    for number, delay in enumerate(delays):
        now = since + 3.0 * number
        beat = RankBeat(0, 7, host, 1, t=START + now + ahead_s - delay)
        told += [(each.host, each.over) for each in clocks.hear([beat], START + now, now)]
    return told


@pytest.mark.parametrize(
    ("ahead_s", "delays", "told"),
    [
        (0.0, (9.0, 9.0, 9.0, 0.1, 9.0, 9.0), []),  # a lighthouse that was busy
        (-2.5, (0.1,) * 6, [("h", False)]),
        (2.5, (0.1,) * 6, [("h", False)]),
        (1.9, (0.0,) * 6, []),
    ],
)
def test_a_clock_is_wrong_if_no_delay_explains_it(ahead_s: float, delays: tuple[float, ...], told: object) -> None:
    assert heard(Clocks(), ahead_s, *delays) == told


def test_a_clock_that_is_nearly_right_is_still_wrong_until_it_is_right_or_not_heard_of() -> None:
    clocks, windows = Clocks(), (0.0,) * 12
    assert 3.0 * len(windows) > 2 * WINDOW_S >= 3.0 * 2 * LEAST
    assert [heard(clocks, ahead, *windows, since=t) for t, ahead in ((0, 5.0), (36, 1.5), (72, 0.2))] == [
        [("h", False)],
        [],
        [("h", True)],
    ]
    assert clocks.ahead() == {"h": pytest.approx(0.2, abs=1e-3)}
    assert heard(clocks, -5.0, *windows, since=108) == [("h", False)]
    assert heard(clocks, 0.0, 0.0, since=141 + SILENT_S, host="other") == [("h", True)]
    assert clocks.ahead() == {}


def test_few_signs_of_life_and_those_without_a_time_say_nothing() -> None:
    clocks = Clocks()
    assert [heard(clocks, -9.0, 0.0, since=t) for t in (0.0, WINDOW_S, 2 * WINDOW_S)] == [[], [], []]
    for now in range(40):
        assert clocks.hear([RankBeat(0, 7, "h", 1)], START, float(now)) == []
