"""Which ranks and hosts are outliers, by the digests of what they have trained."""

from typing import Any

import pytest

from ft_hsdp.analysis.outliers import compare, judge, judge_all, lines

ABOUT = {"host": "h", "steps": 2}
GOOD = [{"a": "0", "b": "0"}, {"a": "1", "b": "1"}, {"a": "2", "b": "2"}]
BAD = [*GOOD[:1], {"a": "1", "b": "x"}, {"a": "y", "b": "y"}]


def rank(digests: list[dict[str, str]] = GOOD, numerics: str = "cpu") -> dict[str, Any]:
    return {"numerics": numerics, "data": {}, "digests": digests}


def host(*ranks: dict[str, Any], together: bool = False) -> dict[str, Any]:
    return judge(ABOUT, [ranks, ranks], together)


@pytest.mark.parametrize(
    ("trials", "sets", "outliers"),
    [
        ("aaa", [["0", "1", "2"]], {}),
        ("aba", [["0", "2"], ["1"]], {"1": 1}),
        ("ab", [["0"], ["1"]], {}),
        ("aabb", [["0", "1"], ["2", "3"]], {}),
        ("aabc", [["0", "1"], ["2"], ["3"]], {}),
        ("aaabc", [["0", "1", "2"], ["3"], ["4"]], {"3": 1, "4": 1}),
    ],
)
def test_more_than_half_are_right(trials: str, sets: list[list[str]], outliers: dict[str, int]) -> None:
    (found,) = compare({str(n): ("cpu", ["start", digest]) for n, digest in enumerate(trials)})
    assert (found.sets, found.outliers) == (sets, outliers)
    assert found.majority == (len(sets[0]) * 2 > len(trials))


def test_other_numerics_are_not_compared() -> None:
    found, said = judge_all({"a": host(rank()), "b": host(rank(BAD, "gpu")), "c": host(rank())})
    assert found["ok"]
    assert [each["sets"] for each in found["compared"]] == [[["a", "c"]], [["b"]]]
    assert len(said) == 2


def test_two_passes_that_differ_name_step_rank_and_tensor() -> None:
    found = judge(ABOUT, [[rank(), rank()], [rank(), rank(BAD)]], together=False)
    assert found["first_difference"] == {"step": 1, "rank": 1, "tensor": "b", "tensors": 1}
    assert (found["reproducible"], found["ok"]) == (False, False)
    assert len(lines(found)) == 1


def test_a_rank_that_is_always_wrong_is_found_beside_others_on_its_host() -> None:
    found = host(rank(), rank(BAD), rank())
    assert (found["reproducible"], found["ok"]) == (True, False)
    assert found["ranks"][0]["outliers"] == {"rank 1": 1}
    assert host(rank(), rank(BAD), together=True)["ok"], "ranks of one replica have other shards"


def test_a_host_that_is_at_fault_has_no_vote() -> None:
    """Of three hosts the bad one and the broken one would be a majority against the good one's bits."""
    broken = judge(ABOUT, [[rank(BAD)], [rank()]], together=False)
    found, said = judge_all({"a": host(rank()), "b": broken, "c": host(rank(), rank())})
    assert (found["ok"], found["faulty"]) == (False, ["b"])
    assert found["compared"][0]["sets"] == [["a", "c"]], "hosts may have unequally many ranks"
    assert len(said) == 2


def test_a_shard_that_differs_makes_its_host_an_outlier() -> None:
    hosts = {name: host(rank(), rank(of), together=True) for name, of in {"a": BAD, "b": BAD, "c": GOOD}.items()}
    found, _ = judge_all(hosts)
    assert found["compared"][0]["outliers"] == {"c": 1}
