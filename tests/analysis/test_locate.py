"""From an element of a parameter to the rank, the host and the process that held it."""

from typing import Any

import pytest

from ft_hsdp.analysis.locate import RunPlaces, element_of
from ft_hsdp.memory.parameters import CutParameter, folded

WIDE, NARROW = (
    folded({"w": CutParameter((5, 4), ((ranks, 0),)), "v": CutParameter((2,), ((ranks, -1),))}) for ranks in (3, 2)
)


def row(name: str, replica: int | None = None, life: int = 0, **facts: Any) -> dict[str, Any]:
    return {"event": name, "replica": replica, "incarnation": f"{replica}-a-{life}", **facts}


EVENTS = [
    row("ReplicaStarted", 0, pids=[10, 11, 12]),
    row("ReplicaStarted", 1, pids=[30, 32, 31]),  # of host c, and of d
    *(row("ReplicaWarmed", replica, layout=WIDE) for replica in (0, 1)),
    row(
        "EpochGranted",
        epoch=1,
        hosts={"0": [["z/r/a", 2], ["z/r/b", 1]], "1": [["c", [[0, 1], [2, 1]]], ["d", [[1, 1]]]]},
    ),
    row("ReplicaStarted", 0, 1, pids=[20, 21]),
    row("ReplicaWarmed", 0, 1, layout=NARROW),
    row("EpochGranted", epoch=2),
    row("EpochGranted", epoch=3, hosts={"0": [["e", 2]]}),
    row("ReplicaWarmed", 1, 1, layout=[]),
]
# step: epoch, contributors, and the lives that applied it
STEPS = {
    1: (1, (0, 1), (0, 0)),
    2: (1, (0, 1), (0, 0)),
    3: (2, (1,), (None, 0)),
    4: (3, (1,), (1, 0)),
    5: (3, (0,), (1, 1)),
}
COMMITS = [
    {"step": n, "epoch": e, "lineage": f"L{n}", "contributors": list(who)} for n, (e, who, _) in STEPS.items()
]
LIVES = {
    replica: {
        f"L{n}": f"{replica}-a-{lives[replica]}"
        for n, (_, _, lives) in STEPS.items()
        if lives[replica] is not None
    }
    for replica in (0, 1)
}


def spans(name: str, element: tuple[int, ...] | None) -> list[tuple[Any, ...]]:
    found = RunPlaces(EVENTS).spans(name, element, COMMITS, LIVES)
    held = [[(h.replica, h.rank, h.host, h.local, h.pid) for h in span.holders] for span in found]
    return [(s.first, s.last, s.contributors, h) for s, h in zip(found, held, strict=True)]


def test_an_element_is_followed_over_lives_widths_and_hosts() -> None:
    other = (1, 1, "d", 0, 31)
    assert spans("w", (2, 0)) == [
        (1, 2, (0, 1), [(0, 1, "a", 1, 11), other]),
        (3, 3, (1,), [other]),
        (4, 4, (1,), [(0, 0, "e", 0, 20), other]),
        (5, 5, (0,), [(0, 0, "e", 0, 20), (1, None, "", None, None)]),
    ]
    assert spans("w", (4, 3))[0][3] == [(0, 2, "b", 0, 12), (1, 2, "c", 1, 32)]


def test_what_all_ranks_hold_is_on_all_and_a_whole_parameter_is_told_in_blocks() -> None:
    assert [(h[0], h[1]) for h in spans("v", (1,))[0][3]] == [(r, n) for r in (0, 1) for n in (0, 1, 2)]
    first = RunPlaces(EVENTS).spans("w", None, COMMITS, LIVES)[0]
    assert [holder.block for holder in first.holders[:3]] == [((0, 2), (0, 4)), ((2, 4), (0, 4)), ((4, 5), (0, 4))]
    assert "rank 2 on b (local rank 0), pid 12 has [4:5, 0:4]" in first.line(blocks=True)
    assert first.line(blocks=True).startswith("steps 1 to 2: ")


@pytest.mark.parametrize(
    ("text", "element"),
    [
        *[("0", (0, 0)), ("19", (4, 3)), ("4,3", (4, 3)), ("[2, 1]", (2, 1))],
        *((text, None) for text in ("20", "5,0", "-1", "1,1,1", "x", "", "1,")),
    ],
)
def test_an_index_is_a_place_in_memory_or_one_of_each_dimension(
    text: str, element: tuple[int, ...] | None
) -> None:
    assert element_of(CutParameter((5, 4), ()), text) == element
