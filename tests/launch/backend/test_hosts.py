import pytest

from ft_hsdp.launch.backend.hosts import EmulatedHosts, HostSwap


def hosts(spare: int = 1, of_spares: int = 0, **more: object) -> EmulatedHosts:
    """Two hosts of two ranks for each replica."""
    return EmulatedHosts(2, 4, spare, of_spares, **more)  # type: ignore[arg-type]


def test_ranks_are_spread_evenly_and_stay_where_they_are() -> None:
    made = hosts()
    assert made.of(1) == ("r1h0", "r1h0", "r1h1", "r1h1")
    assert [made.environment(rank)["FT_HSDP_HOST_RANK"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert made.place(1, [], []) == []
    assert made.of(1) == ("r1h0", "r1h0", "r1h1", "r1h1")


def test_a_machine_that_is_its_own_host_waits_while_it_is_down() -> None:
    alone = EmulatedHosts()
    assert (alone.of(0), alone.environment(0)) == ((), {})
    assert alone.place(0, ["node1"], []) is None
    assert alone.place(0, [], []) == []
    assert alone.free([]) == []


def test_a_spare_host_takes_the_place_of_a_lost_one_which_is_spare_when_it_is_back() -> None:
    made = hosts()
    made.lose(0, ["r0h1"])
    assert made.place(0, ["r0h1"], []) == [HostSwap("r0h1", "s0", (2, 3))]
    assert made.of(0) == ("r0h0", "r0h0", "s0", "s0")
    assert made.free(["r0h1"]) == []
    assert made.free([]) == ["r0h1"]
    assert made.lose(0, ["s0"]) == ("s0",)
    assert made.place(0, ["s0"], []) == [HostSwap("s0", "r0h1", (2, 3))]


def test_a_host_that_was_lost_for_a_moment_leaves_its_ranks_if_there_is_a_spare() -> None:
    made = hosts()
    assert made.lose(0, ["r0h0"]) == ("r0h0",)
    assert [swap.spare for swap in made.place(0, [], []) or []] == ["s0"]
    assert made.lose(0, ["s0"]) == ("s0",)
    assert [swap.spare for swap in made.place(0, [], []) or []] == ["r0h0"], "it is back, and spare"
    none_left = hosts(spare=0)
    none_left.lose(0, ["r0h0"])
    assert none_left.place(0, ["r0h0"], []) is None
    assert none_left.place(0, [], []) == [], "it is back: its ranks need not wait any more"
    assert none_left.of(0)[0] == "r0h0"


def test_a_cordoned_host_gets_no_ranks_and_is_no_spare() -> None:
    made = hosts(spare=2)
    made.cordon("r0h0", "exit 76")
    assert [swap.spare for swap in made.place(0, [], []) or []] == ["s0"]
    assert made.free([]) == ["s1"]
    made.cordon("s1", "exit 76")
    made.cordon("s0", "exit 76")
    assert made.place(0, [], []) is None
    assert "s0 is cordoned" in made.vacancy(0, [])


def test_hosts_of_spare_replicas_are_taken_last() -> None:
    made = hosts(spare=1, of_spares=2)
    assert made.kept_ready([]) == ["s0"]
    assert [swap.spare for swap in made.place(0, ["r0h0"], []) or []] == ["s0"]
    assert [swap.spare for swap in made.place(1, ["r0h0", "r1h1"], []) or []] == ["s1"]
    made = hosts(spare=1, of_spares=2)
    both = made.place(0, ["r0h0", "r0h1"], []) or []
    assert [(swap.lost, swap.spare, swap.ranks) for swap in both] == [
        ("r0h0", "s0", (0, 1)),
        ("r0h1", "s1", (2, 3)),
    ]


def test_the_spare_host_stands_apart_from_the_other_copies_if_there_is_a_choice() -> None:
    """Replica 1 has its copy of the lost shards in rack 1, and so is s0."""
    racks = {"r0*": "0", "r1*": "1", "s0": "1", "s1": "2"}
    made = hosts(spare=2, labels=racks)
    made.of(1)
    assert [swap.spare for swap in made.place(0, ["r0h1"], []) or []] == ["s1"]


def test_all_hosts_are_listed_with_their_states() -> None:
    made = hosts(spare=2)
    made.place(0, ["r0h1"], [])
    made.cordon("s1", "exit 76")
    assert [(row["host"], row["state"], row["replica"]) for row in made.listed(["r0h1"])] == [
        ("r0h0", "used", 0),
        ("s0", "used", 0),
        ("s1", "cordoned", None),
        ("r0h1", "down", None),
    ]


def test_a_spare_host_is_promised_to_one_host_only() -> None:
    made = EmulatedHosts(2, 2, spare=1)
    for replica in (0, 1):
        assert made.place(replica, [], []) == []
    assert made.spare_for("r0h0", [])
    made.cordon("r0h0", "exit 76")
    assert not made.spare_for("r1h0", []), "r0h0 has not moved yet"
    assert not made.spare_for("r1h0", ["s0"])
    made.place(0, [], [])
    assert not made.spare_for("r1h0", ["r0h1"])
    assert made.place(1, [], []) == [], "it stays where it is"


def test_a_replica_goes_on_on_the_hosts_that_it_has_left_and_grows_when_one_is_back() -> None:
    made, down = hosts(0), ["r0h1"]
    assert made.lose(0, down) == ("r0h1",)
    assert made.place(0, down, []) is None
    assert made.shrink(0, down, [], 3) == 0
    assert made.of(0) == ("r0h0", "r0h0", "r0h1", "r0h1"), "it waits"
    assert made.shrink(0, down, [], 2) == 2
    assert made.of(0) == ("r0h0", "r0h0")
    assert made.lose(0, down) == (), "it does not run there"
    assert not made.could_grow(0, down, [])
    assert made.could_grow(0, [], [])
    assert made.of(0) == ("r0h0", "r0h0"), "it runs there"
    assert made.place(0, [], []) == []
    assert made.of(0) == ("r0h0", "r0h0", "r0h1", "r0h1")
    assert not made.could_grow(0, [], []), "it has all"


def test_a_replica_that_loses_its_last_hosts_or_has_one_machine_waits() -> None:
    made = hosts(0)
    assert made.shrink(0, ["r0h0"], [], 1) == 2
    assert made.lose(0, ["r0h0", "r0h1"]) == ("r0h1",)
    assert made.shrink(0, ["r0h0", "r0h1"], [], 1) == 0
    assert EmulatedHosts().shrink(0, ["node1"], [], 1) == 0


@pytest.mark.parametrize(
    ("down", "first"),
    [
        (("r1h3", "r2h3"), 1),  # equal: the lowest id
        (("r1h3", "r2h2", "r2h3"), 1),  # the smaller one needs two
        (("r1h2", "r1h3", "r2h2", "r2h3"), None),  # one spare host is enough for neither
    ],
)
def test_of_two_that_run_with_fewer_ranks_one_leaves_for_a_spare_host(down, first) -> None:
    """All three run; the host that is back is spare. The other one would start again for nothing."""
    made = EmulatedHosts(4, 4, spare=1)
    for replica in (1, 2):
        assert made.place(replica, [], []) == []
    made.lose(0, ["r0h3"])
    assert made.place(0, ["r0h3"], [])
    for replica in (1, 2):
        made.lose(replica, down)
        assert made.shrink(replica, ["r0h3", *down], [], 1)
    assert not any(made.could_grow(replica, ["r0h3", *down], []) for replica in (1, 2))
    grow = [replica for replica in (1, 2) if made.could_grow(replica, down, [])]
    assert grow == ([] if first is None else [first])
    if first is not None:
        assert [swap.spare for swap in made.place(first, down, []) or []] == ["r0h3"]
        assert not made.could_grow(3 - first, down, []), "the host has ranks"


def test_who_has_lent_its_hosts_goes_on_with_fewer_ranks_and_lends_no_more() -> None:
    made, down = EmulatedHosts(3, 3), ["r0h1", "r0h2"]
    made.place(1, [], [])
    made.lose(0, down)
    assert made.shrink(0, down, [], 2) == 0
    made.lend(0)
    assert made.shrink(0, down[1:], [], 2) == 2, "r0h1 is back"
    made.lose(1, ["r1h0"])
    assert made.place(1, ["r0h2", "r1h0"], []) is None
    assert made.place(1, ["r0h2", "r1h0"], [0]) is None, "it waits for a while, and lends nothing"


def test_a_replica_does_not_go_on_with_fewer_ranks_when_it_can_have_all() -> None:
    made = hosts(1)
    made.lose(0, ["r0h1"])
    assert made.shrink(0, ["r0h1"], [], 1) == 0
    assert [swap.spare for swap in made.place(0, ["r0h1"], []) or []] == ["s0"]


def test_a_host_is_cordoned_if_its_replica_can_do_without_it() -> None:
    made = hosts(0)
    assert made.can_lose(0, "r0h1", [], 2)
    assert not made.can_lose(0, "r0h1", [], 3)
    assert not made.can_lose(0, "r0h1", ["r0h0"], 1)
    assert not made.can_lose(0, "r0h1", [], None)


def test_a_replica_that_waits_lends_its_hosts_and_waits_for_the_lost_ones() -> None:
    made, down = hosts(0), ["r0h1", "r1h0"]
    made.of(1)
    made.lose(0, down)
    made.lose(1, down)
    assert made.place(1, down, [0]) is None, "replica 0 has not waited long enough"
    made.lend(0)
    assert made.place(1, down, []) is None, "it does not wait any more"
    assert made.place(1, down, [0]) == [HostSwap("r1h0", "r0h0", (0, 1), 0)]
    assert made.of(1) == ("r0h0", "r0h0", "r1h1", "r1h1")
    assert made.of(0) == ("r1h0", "r1h0", "r0h1", "r0h1")
    assert made.free([]) == [], "no host is spare because of that"
    assert made.place(0, ["r1h0"], []) is None, "one of two is back"
    assert made.place(0, [], []) == []
    assert made.of(0) == ("r1h0", "r1h0", "r0h1", "r0h1")
    made.lose(1, ["r1h1"])
    assert made.place(1, ["r1h1"], [0]) is None, "what runs lends nothing"


def test_the_hosts_of_a_replica_that_is_given_up_are_spare_for_the_others() -> None:
    made, down = hosts(0), ["r0h1"]
    for replica in (0, 1):
        assert made.place(replica, [], []) == []
    made.lose(0, down)
    made.vacate(0)
    assert made.free(down) == ["r0h0"]
    assert made.kept_ready(down) == [], "its agent runs"
    assert made.spare_for("r1h0", down), "r0h1 waits for nothing any more"
    assert made.place(1, [*down, "r1h0"], []) == [HostSwap("r1h0", "r0h0", (0, 1))]
    assert made.of(1) == ("r0h0", "r0h0", "r1h1", "r1h1")
    assert made.free(["r0h1"]) == ["r1h0"], "it is spare when it is back"
    assert sorted(str(row["host"]) for row in made.listed([])) == ["r0h0", "r0h1", "r1h0", "r1h1"]


def test_a_host_that_is_down_and_was_given_up_takes_no_spare_from_the_others() -> None:
    made = hosts(1)
    for replica in (0, 1):
        assert made.place(replica, [], []) == []
    assert not made.spare_for("r1h0", ["r0h1"]), "replica 0 waits for it"
    made.vacate(0)
    assert made.spare_for("r1h0", ["r0h1"])
    assert [swap.spare for swap in made.place(1, ["r0h1", "r1h0"], []) or []] == ["s0"], "spare hosts come first"


def test_a_drained_replica_has_the_hosts_again_that_nobody_took() -> None:
    made = hosts(0)
    for replica in (0, 1):
        assert made.place(replica, [], []) == []
    made.vacate(0)
    assert made.of(0) == ("r0h0", "r0h0", "r0h1", "r0h1"), "asked for late, which takes no host back"
    assert made.free([]) == ["r0h0", "r0h1"]
    assert made.place(0, [], []) == []
    assert made.free([]) == []
    made.vacate(0)
    assert [swap.spare for swap in made.place(1, ["r1h1"], []) or []] == ["r0h0"]
    assert made.place(0, ["r1h1"], []) is None, "it waits for the host of the other one"
    assert made.place(0, [], []) == []
    assert made.of(0) == ("r1h1", "r1h1", "r0h1", "r0h1")


def test_a_replica_that_was_never_placed_has_no_hosts_to_give() -> None:
    made = hosts(0)
    made.vacate(2)
    assert made.free([]) == []
    assert made.place(2, [], []) == []
