"""ProcessGroupFTAR.reconfigure: members by handles, old uuids, bad handles, and members that are lost in it."""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp, TCPStore

from ft_hsdp.compat.torchft import ProcessGroupFTAR
from ft_hsdp.compat.torchft.handles import MAX_HANDLE, MAX_MEMBERS, encode, membership, own_host
from ft_hsdp.errors import InvalidArgument
from tests.support.ftar.torchft_process import GroupProcess, options
from tests.support.ftar.torchft_ranks import Ranks
from tests.support.ftar.torchft_ranks import of_module as of_module
from tests.support.ftar.torchft_ranks import three as three
from tests.support.waiting import until

WITHIN_S = 90.0
ID = "0" * 32
OWN = encode(ID, "127.0.0.1:1", None, 0)


def handles(groups: list[ProcessGroupFTAR]) -> list[str]:
    return [group.get_reconfigure_handle() for group in groups]


def total(group: ProcessGroupFTAR, rank: int) -> float:
    tensor = torch.tensor([10.0**rank])
    assert group.allreduce([tensor], ReduceOp.SUM).wait()
    return tensor.item()


def reconfigured(ranks: Ranks, groups: list[ProcessGroupFTAR], uuid: int, named: list[str] | None = None) -> None:
    """Reconfigure ``groups``, in this order, and use their ring."""
    names = named or handles(groups)

    def reconfigure(group: ProcessGroupFTAR, rank: int) -> float:
        work = group.reconfigure(options(uuid, names, WITHIN_S))
        assert work.wait()
        assert work.get_future().wait() is None
        assert group.size() == len(groups)
        return total(group, rank)

    assert ranks.each(reconfigure, groups) == [float("1" * len(groups))] * len(groups)


def refused(group: ProcessGroupFTAR, opts: Any, kind: type[Exception] = InvalidArgument) -> str:
    with pytest.raises(kind) as caught:
        group.reconfigure(opts)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    return said


def test_members_are_the_handles_in_their_order_and_may_come_and_go(three: Ranks) -> None:
    a, b, c = three.groups
    assert a.supports_reconfigure
    for uuid, groups in enumerate(([a], [b, a], [c, a, b], [b, c], [a, b, c])):
        reconfigured(three, groups, uuid)


def test_both_seams_form_the_same_ring_one_after_the_other(three: Ranks) -> None:
    for uuid in (7, 8):
        reconfigured(three, three.groups, uuid)
        three.configure(three.groups)
        assert three.each(total) == [111.0] * 3


def test_a_handle_names_the_group_its_store_and_its_global_rank(three: Ranks) -> None:
    group = three.groups[0]
    group.set_rank_info("replica", 0, 1, 5)
    handle = json.loads(group.get_reconfigure_handle())
    assert handle["global_rank"] == 5
    host, port = handle["store"].split(":")
    assert host == "127.0.0.1"
    assert int(port)
    assert group.get_reconfigure_handle() == group.get_reconfigure_handle()
    group.set_rank_info("replica", 0, 1)
    assert json.loads(group.get_reconfigure_handle())["global_rank"] is None


def test_without_a_host_a_handle_has_the_address_that_leads_to_the_lighthouse(monkeypatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:29510")
    assert own_host() == "127.0.0.1"
    group = ProcessGroupFTAR()
    try:
        assert json.loads(group.get_reconfigure_handle())["store"].startswith("127.0.0.1:")
    finally:
        group.shutdown()


def test_a_uuid_may_come_again_with_new_handles_and_handles_with_a_new_uuid(three: Ranks) -> None:
    reconfigured(three, three.groups, 1)
    reconfigured(three, three.groups, 1)  # a lighthouse that was restarted begins to count again
    names = handles(three.groups)
    for uuid in (2, 3):
        reconfigured(three, three.groups, uuid, names)


def test_a_member_with_an_old_uuid_is_refused_and_breaks_nothing(three: Ranks) -> None:
    names = handles(three.groups)
    reconfigured(three, three.groups, 1, names)
    reconfigured(three, three.groups, 2, names)
    assert "uuid: got 1 once more" in refused(three.groups[1], options(1, names))
    assert three.each(total) == [111.0] * 3, "the newer quorum goes on"


def keys(group: ProcessGroupFTAR) -> int:
    host, port = json.loads(group.get_reconfigure_handle())["store"].split(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False).num_keys()


def test_the_store_forgets_quorums_that_are_over_but_not_why_a_rank_gave_up(three: Ranks) -> None:
    a, b = three.groups[:2]
    kept = []
    for uuid in range(5):
        reconfigured(three, [a, b], uuid)
        kept.append(keys(a))
    assert kept[1:] == kept[1:2] * 4
    names = handles([a, b])
    assert "did not come" in refused(a, options(5, names, 0.2), RuntimeError)
    reconfigured(three, [a], 6)
    assert "gave up" in refused(b, options(5, names, WITHIN_S), RuntimeError)


def test_a_reconfigure_can_be_cancelled_by_abort_and_by_a_newer_one(three: Ranks) -> None:
    group, other = three.groups[:2]
    for uuid, cancel in ((7, group.abort), (8, lambda: reconfigured(three, [group], 9))):
        said: list[str] = []
        asked, before = options(uuid, handles([other, group]), WITHIN_S), keys(other)
        thread = threading.Thread(
            target=lambda asked=asked, said=said: said.append(refused(group, asked, RuntimeError))
        )
        thread.start()
        until(lambda other=other, before=before: keys(other) > before, "it is under way", WITHIN_S)
        cancel()
        thread.join(WITHIN_S)
        assert said
        assert said[0].startswith("aborted")
    assert total(group, 0) == 1.0, "the newer one goes on"


def changed(**values: Any) -> Callable[[str], str]:
    return lambda own: json.dumps({**json.loads(own), **values})


BAD: dict[str, Callable[[str], Any]] = {
    "no text": lambda own: 7,
    "no JSON": lambda own: "\x80nonsense",
    "deep": lambda own: "[" * MAX_HANDLE,
    "too long": lambda own: own + " " * MAX_HANDLE,
    "a pickle": lambda own: "\x80\x04\x95.",
    "a key less": lambda own: json.dumps({"id": "0" * 32, "store": "h:1", "global_rank": None}),
    "an odd id": changed(id="../../etc"),
    "no port": changed(id="0" * 32, store="127.0.0.1"),
    "port 0": changed(id="0" * 32, store="127.0.0.1:0"),
    "a prefix": changed(id="0" * 32, store="127.0.0.1:1/torchft/7"),
    "a large rank": changed(id="0" * 32, global_rank=10**400),
    "the same twice": lambda own: own,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_handle_is_one_clear_error_and_the_quorum_goes_on(three: Ranks, bad: Callable[[str], Any]) -> None:
    group = three.groups[0]
    own = group.get_reconfigure_handle()
    assert re.search("handle of rank 1|twice", refused(group, options(11, [own, bad(own)])))
    assert three.each(total) == [111.0] * 3


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text(), max_size=2)
KEYS = st.sampled_from(["id", "store", "global_rank", "count", "other"])


@given(st.text() | st.dictionaries(KEYS, VALUES).map(lambda odd: json.dumps({**json.loads(OWN), **odd})))
def test_any_other_text_is_a_handle_or_one_clear_error(text: str) -> None:
    said = ""
    try:
        quorum = membership(options(1, [OWN, text]), ID)
    except InvalidArgument as error:
        said = str(error)
    assert said.startswith("handle") if said else (quorum.rank, quorum.size, quorum.store) == (0, 2, "127.0.0.1:1")
    assert len(said) < 500


def test_the_name_of_a_membership_covers_the_uuid_and_the_order_of_the_handles() -> None:
    other = encode("1" * 32, "127.0.0.1:2", None, 0)
    uses = [options(1, [OWN, other]), options(2, [OWN, other]), options(1, [other, OWN]), options(1, [OWN])]
    assert len({membership(use, ID).name for use in uses}) == len(uses)
    assert [membership(use, ID).rank for use in uses] == [0, 0, 1, 0]
    assert membership(uses[0], ID).name == membership(uses[0], "1" * 32).name


def test_wrong_members_and_odd_options_are_one_clear_error(three: Ranks) -> None:
    group, other = three.groups[:2]
    own, theirs = handles([group, other])
    assert "without this group's own" in refused(group, options(1, [theirs]))
    for odd in ({own}, (own,), own, None, {own: 1}, [], [own] * (MAX_MEMBERS + 1)):
        assert "handles: got" in refused(group, options(1, odd))
    for odd in ("7", 1.0, None, True, 2**64, -(2**63) - 1):
        assert "uuid: got" in refused(group, options(odd, [own]))
    assert three.each(total) == [111.0] * 3


def test_a_handle_from_before_a_shutdown_is_refused() -> None:
    with closing(Ranks(1, host="127.0.0.1")) as ranks:
        (group,) = ranks.groups
        old = group.get_reconfigure_handle()
        group.shutdown()
        assert "before this group's shutdown" in refused(group, options(1, [old]))
        reconfigured(ranks, [group], 1)
        assert "before this group's shutdown" in refused(group, options(2, [old]))


@pytest.mark.parametrize(
    "raw", [b"[" * 900, b"[0]", b'[-1, "x"]', b'[1e400, "x"]', b'[4294967296, "x"]', b"\x80\x04."]
)
def test_junk_in_the_store_is_one_clear_error_and_poisons_no_epoch(three: Ranks, raw: bytes) -> None:
    group = three.groups[0]
    place = three.prefix()
    three.store.set(place.partition("/")[2] + "/claim/1", raw)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="rank 1 wrote"):
        group.configure(place, "0", 0, 2)
    three.configure(three.groups)
    assert three.each(total) == [111.0] * 3


@pytest.fixture(scope="module")
def _processes() -> Iterator[list[GroupProcess]]:
    made = [GroupProcess() for _ in range(3)]
    yield made
    for process in made:
        process.close()


@pytest.fixture
def processes(_processes: list[GroupProcess]) -> list[GroupProcess]:
    while len(_processes) < 3:
        _processes.append(GroupProcess())
    return _processes


def lose(
    processes: list[GroupProcess], place: str, rank: int, number: signal.Signals, timeout_s: float
) -> list[Any]:
    """Lose the process ``rank`` at ``place`` of a reconfigure; what the others were told, who go on without it."""
    names = [p.handle() for p in processes]
    for i, process in enumerate(processes):
        process.begin(1, names, timeout_s, place if i == rank else "")
    victim = processes[rank]
    assert victim.hear() == "there"
    victim.signal(number)
    rest = [p for p in processes if p is not victim]
    told = [p.hear() for p in rest]
    names = [p.handle() for p in rest]
    for process in rest:
        process.begin(2, names, WITHIN_S)
    assert [p.hear()[0] for p in rest] == [2.0, 2.0]
    victim.close()
    processes.remove(victim)
    return told


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("place", "rank", "number", "timeout_s", "said"),
    [
        ("claimed", 1, signal.SIGKILL, 0.5, "rank 1 of 3 did not come|rank . gave up: rank 1 of 3"),
        ("claimed", 0, signal.SIGKILL, WITHIN_S, "the store of the ranks"),
        ("claimed", 0, signal.SIGSTOP, 0.5, "timeout after 500ms"),
        ("in the ring", 1, signal.SIGKILL, WITHIN_S, "gloo is not connected, and a rank is|Connection closed"),
        ("in the ring", 0, signal.SIGSTOP, WITHIN_S, "gloo is not connected, and a rank is gone"),
    ],
)
def test_a_process_is_lost_in_the_middle_of_a_reconfigure(processes, place, rank, number, timeout_s, said) -> None:
    for text, seconds in lose(processes, place, rank, number, timeout_s):
        assert re.search(said, str(text)), text
        assert seconds < WITHIN_S / 2
