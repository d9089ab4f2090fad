"""The kernels' own schedule is the ring's: the product's engine and the reference cut a message alike."""

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton)")

from hypothesis import given
from hypothesis import strategies as st

from ft_hsdp.core.ring import RingPlan, operations
from ftar_kernels.schedule import FROM_LOCAL, FROM_RECV, TO_OUT, TO_SEND, Command, Kind, Schedule, kinds

sizes = st.integers(0, 5000)
small = st.integers(1, 9)


@given(sizes, st.integers(1, 16), st.integers(1, 300), small)
def test_cuts_as_the_ring_does(elements, members, chunk, slots):
    plan = RingPlan(elements, members, chunk, slots)
    schedule = Schedule(elements, members, chunk, slots)
    assert schedule.rounds == plan.rounds
    for shard in range(members):
        for round_ in range(plan.rounds):
            span = plan.span(shard, round_)
            assert schedule.span(shard, round_) == (span.start, span.stop)


@given(st.integers(1, 16), st.data())
def test_operations_are_those_of_the_ring(members, data):
    position = data.draw(st.integers(0, members - 1))
    ours = [(k.value, Schedule(1, members, 1, 1).shard(position, n)) for n, k in enumerate(kinds(members))]
    assert ours == [(o.kind.value, o.shard) for o in operations(position, members)]


@pytest.mark.parametrize(
    ("kind", "recv", "contributes", "mode"),
    [
        (Kind.COPY_SEND, None, True, FROM_LOCAL | TO_SEND),
        (Kind.COPY_SEND, None, False, 0),
        (Kind.REDUCE_SEND, 0, True, FROM_RECV | FROM_LOCAL | TO_SEND),
        (Kind.REDUCE_SEND, 0, False, FROM_RECV | TO_SEND),
        (Kind.REDUCE_SEND, None, True, FROM_LOCAL | TO_SEND),
        (Kind.REDUCE_SEND, None, False, 0),
        (Kind.REDUCE_STORE_SEND, 0, True, FROM_RECV | FROM_LOCAL | TO_SEND | TO_OUT),
        (Kind.REDUCE_STORE_SEND, None, False, TO_SEND | TO_OUT),
        (Kind.STORE_SEND, 0, True, FROM_RECV | TO_SEND | TO_OUT),
        (Kind.STORE, 0, True, FROM_RECV | TO_OUT),
        (Kind.STORE, None, True, FROM_LOCAL | TO_OUT),
    ],
)
def test_a_command_says_what_is_read_and_written(kind, recv, contributes, mode):
    assert Command(kind, 0, 4, recv, 0 if kind.sends else None).mode(contributes) == mode
