from __future__ import annotations

from ft_hsdp.config import parse
from ft_hsdp.train.runtime import leader_settings


def test_only_a_replica_s_first_life_gives_up_on_a_lighthouse_that_does_not_answer() -> None:
    config = parse({"timeouts": {"reach_s": 7}, "ranks_per_replica": 3})
    first, later = leader_settings(config, restarted=False), leader_settings(config, restarted=True)
    assert (first.join_timeout_s, later.join_timeout_s) == (7.0, None)
    assert (first.reach_s, later.reach_s, first.ranks) == (7.0, 7.0, 3)
