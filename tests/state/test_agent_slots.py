import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ft_hsdp.core.state_id import StateId
from ft_hsdp.state.agent.messages import CompleteSnapshot
from ft_hsdp.state.agent.slots import MAX_SLOTS, SPARE_STAGES, SnapshotSlots
from tests.support.state.agent_helpers import state


def write(slots: SnapshotSlots, step: int, now: float = 0.0, *, last: bool = False) -> int | None:
    number = slots.stage(state(step), now, last=last)
    if number is not None:
        assert slots.staged(state(step)) == number
    return number


def with_slots(count: int) -> SnapshotSlots:
    slots = SnapshotSlots()
    for _ in range(count):
        slots.add()
    return slots


def steps(slots: SnapshotSlots) -> list[int]:
    return [held.state.step for held in slots.held()]


def test_the_newest_settled_stays_until_a_newer_is_settled():
    slots = with_slots(3)
    write(slots, 1)
    slots.mark_settled(state(1))
    for step in (2, 3, 4):
        write(slots, step)
        assert 1 in steps(slots)
    slots.mark_settled(state(4))
    write(slots, 5)
    write(slots, 6)
    assert 1 not in steps(slots)


@pytest.mark.parametrize("count", [2, 3])
def test_states_that_count_are_kept_where_only_each_fourth_is_copied(count: int):
    """Also without memory for a third slot; with it, the newest snapshot is never lost either."""
    slots = with_slots(count)
    for step in range(1, 30):
        if step > 1:
            slots.mark_settled(state(step - 1), (step - 1) % 4 == 0 or None)
        before = steps(slots)
        assert write(slots, step, last=count == 2) is not None, "none is left out"
        settled = [held.state.step for held in slots.held() if held.settled]
        assert settled[:1] == ([4 * ((step - 1) // 4)] if step > 4 else [])
        assert count == 2 or before[:1] == [s for s in steps(slots) if s in before][:1]


def test_readers_cost_slots_and_never_a_wait():
    slots = with_slots(4)
    for step in (1, 2, 3, 4):
        number = write(slots, step)
        assert number is not None
        slots.borrow(number)
    assert slots.full
    assert write(slots, 5) is None
    assert steps(slots) == [4, 3, 2, 1]
    slots.give_back(2)
    assert write(slots, 5) == 2


def test_slots_that_are_not_needed_for_long_go():
    slots = with_slots(4)
    for step in range(SPARE_STAGES - 1):
        write(slots, step)
        slots.mark_settled(state(step))
    assert len(slots.numbers) == 4
    write(slots, 100)
    assert len(slots.numbers) == 2


class Machine(RuleBasedStateMachine):
    """Drives Slots as an agent does, beside a plain account of what must never be handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SnapshotSlots()
        self.now = 0.0
        self.pin: tuple[StateId, float] | None = None
        self.content: dict[int, StateId] = {}  # complete slots, oldest first
        self.settled: set[int] = set()
        self.passed: set[int] = set()
        self.never: set[int] = set()
        self.readers: dict[int, int] = {}
        self.writing: tuple[int, StateId] | None = None

    def kept(self, last: bool) -> set[int]:
        giving = self.passed | (self.never if last else set())
        newest = [number for number in list(self.content)[-1:] if not (number in giving and self.settled)]
        settled = [number for number in self.content if number in self.settled][-1:]
        pinned = []
        if self.pin is not None and self.now < self.pin[1]:
            pinned = [number for number, held in self.content.items() if held == self.pin[0]]
        return {*newest, *settled, *pinned, *self.readers}

    @rule(step=st.integers(0, 5), last=st.booleans())
    def stage(self, step, last):
        kept = self.kept(last)
        number = self.slots.stage(state(step), self.now, last=last)
        if number is None and not self.slots.full:
            self.slots.add()
            number = self.slots.stage(state(step), self.now, last=last)
        gone_or_used = {n for n in self.content if n not in self.slots.numbers or n == number}
        assert not gone_or_used & kept
        if number is None:  # only readers can use up all slots: what is kept otherwise are three at most
            assert self.readers
        self.content = {n: held for n, held in self.content.items() if n not in gone_or_used}
        self.settled -= gone_or_used
        self.passed -= gone_or_used
        self.never -= gone_or_used
        self.writing = None if number is None else (number, state(step))

    @precondition(lambda self: self.writing is not None)
    @rule()
    def staged(self):
        number, held = self.writing
        assert self.slots.staged(held) == number
        self.content[number] = held
        self.writing = None

    @rule(reuse=st.booleans())
    def abandon(self, reuse):
        self.slots.abandon(reuse=reuse)
        assert self.writing is None or reuse == (self.writing[0] in self.slots.numbers)
        self.writing = None

    @rule(step=st.integers(0, 5), everywhere=st.sampled_from([True, False, None]))
    def mark_settled(self, step, everywhere):
        self.slots.mark_settled(state(step), everywhere)
        if everywhere is None:
            self.never |= {number for number, held in self.content.items() if held.step <= step}
        elif everywhere:
            self.settled |= {number for number, held in self.content.items() if held == state(step)}
        else:
            self.passed |= self.content.keys() - self.settled

    @rule(step=st.integers(0, 5), seconds=st.integers(0, 3))
    def hold(self, step, seconds):
        self.pin = state(step), self.now + seconds
        self.slots.pin(*self.pin)

    @rule()
    def unpin(self):
        self.pin = None
        self.slots.unpin()

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def borrow(self, data):
        number = self.slots.find(data.draw(st.sampled_from([*self.content.values()])))
        assert number is not None
        self.slots.borrow(number)
        self.readers[number] = self.readers.get(number, 0) + 1

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def give_back(self, data):
        number = data.draw(st.sampled_from([*self.readers]))
        self.slots.give_back(number)
        self.readers[number] -= 1
        if not self.readers[number]:
            del self.readers[number]

    @rule()
    def forget(self):
        self.slots.forget()
        self.content, self.settled, self.passed, self.never = {}, set(), set(), set()
        self.pin = self.writing = None
        assert self.slots.numbers == set(self.readers)

    @invariant()
    def never_too_many(self):
        assert len(self.slots.numbers) <= MAX_SLOTS

    @invariant()
    def holds_what_it_should(self):
        expected = [
            CompleteSnapshot(held, number in self.settled) for number, held in reversed(self.content.items())
        ]
        assert list(self.slots.held()) == expected
        assert set(self.readers) <= self.slots.numbers


TestSlotsAreNeverTakenAway = Machine.TestCase
TestSlotsAreNeverTakenAway.settings = settings(max_examples=100, stateful_step_count=40)
