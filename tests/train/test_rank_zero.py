import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ft_hsdp.config import parse
from ft_hsdp.core.state_id import StateId
from ft_hsdp.errors import ConfigError, Retryable
from ft_hsdp.memory.replacement import RankClaim, disagreement
from ft_hsdp.train.rank_zero import replica_policy, same_data
from ft_hsdp.train.state.recovery import check_in

HOSTS = ("r0h0", "s0")
GANG = [RankClaim(rank, 2, "0-a-1", HOSTS[rank], HOSTS, StateId(2, 7, "ab")) for rank in range(2)]


def test_ranks_that_agree() -> None:
    assert disagreement(GANG) == ""
    assert disagreement([replace(claim, host="", hosts=()) for claim in GANG]) == "", "no emulated hosts"


@pytest.mark.parametrize(
    ("different", "told"),
    [
        ({"incarnation": "0-a-0"}, "rank 1 is of incarnation 0-a-0, rank 0 of 0-a-1"),
        ({"ranks": 4}, "rank 1 of 4 is in the place of rank 1 of 2"),
        ({"rank": 0}, "rank 0 of 2 is in the place of rank 1 of 2"),
        ({"hosts": ("r0h0", "r0h1")}, "rank 1 was placed on hosts r0h0, r0h1, rank 0 on r0h0, s0"),
        ({"host": "r0h1"}, "rank 1 is on host r0h1, and was placed on s0"),
        ({"state": StateId(2, 6, "cd")}, "rank 1 holds (2, 6, cd), rank 0 holds (2, 7, ab)"),
    ],
)
def test_a_rank_that_contradicts_is_named(different: dict[str, Any], told: str) -> None:
    assert disagreement([GANG[0], replace(GANG[1], **different)]) == told


class Told:
    """Stands for the ranks of a replica: what they have told each other."""

    def __init__(self, *claims: RankClaim) -> None:
        self._claims = claims

    def gather(self, mine: bytes) -> list[bytes]:
        return [json.dumps(asdict(claim)).encode() for claim in self._claims]


@pytest.mark.parametrize("different", [{}, {"host": "r0h1"}])
def test_the_ranks_compare_what_they_are_before_they_check_in(different: dict[str, Any]) -> None:
    joined: list[StateId] = []
    mine = GANG[1]
    runtime: Any = SimpleNamespace(
        place=SimpleNamespace(rank=mine.rank, ranks=mine.ranks),
        identity=SimpleNamespace(replica=0, incarnation=mine.incarnation, shared=mine.host, hosts=mine.hosts),
        ranks=Told(GANG[0], replace(GANG[1], **different)),
        join=lambda state, _: joined.append(state),
    )
    with pytest.raises(Retryable, match="contradict each other") if different else nullcontext():
        check_in(runtime, mine.state, None)  # type: ignore[arg-type]
    assert joined == ([] if different else [mine.state])


def test_ranks_of_a_replica_with_other_data_are_refused_by_number() -> None:
    first = {"length": "160", "sample 0": "random"}
    assert same_data([first, {"length": "160", "sample 9": "cd"}]) == {**first, "sample 9": "cd"}
    with pytest.raises(ConfigError, match=r"^data: length on rank 2 .*'159'; allowed: 160, as on rank 0"):
        same_data([first, {"sample 0": "ab"}, {"length": "159"}])


@pytest.mark.parametrize(("room", "steps"), [(39, 3), (9, 1), (1 << 40, 64)])
def test_a_log_has_as_many_steps_as_its_memory_holds_and_one_at_least(room: int, steps: int) -> None:
    assert replica_policy(parse({"quorum": {"catchup_log_bytes": room}}), 10).catchup_log_steps == steps
