"""A fetch that fails, in whatever way, is reported; whoever waits for it would wait without an end."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_hsdp.config import Config
from ft_hsdp.core.commit import CommitRecord
from ft_hsdp.core.effects import BufferUpdate, Commit, Configure, DropCopies, Fetch, Keep, RunBatch
from ft_hsdp.core.grant import Grant, Member
from ft_hsdp.core.state_id import StateId
from ft_hsdp.jsonl import Journal
from ft_hsdp.protocol import RankFetchFailed, Settled
from ft_hsdp.state.agent.messages import FreeCopies, Settle
from ft_hsdp.state.transfer import fetch
from ft_hsdp.state.transfer.shard_manifest import Layout
from ft_hsdp.train import device, orders
from ft_hsdp.train.orders import ApplyOrder, Fetching, KeepOrder, Mailbox, OrderHandler
from tests.support.train.one_rank import OneRank

BASE = StateId(1, 5, "c" * 32)


def handler(
    folder: Path,
    snapshots: Any,
    report: Callable[[object], None] = lambda _: None,
    within_s: float = 7.0,
    mailbox: Mailbox | None = None,
    *,
    counts: bool = True,
) -> OrderHandler:
    """The handler of rank 0 of replica 0, which has these snapshots and nothing else that is real."""
    fetching, journal = Fetching(1, Layout((), 64), "token", within_s), Journal(folder / "events.jsonl")
    group, reducer, copies, spans = (mock.Mock() for _ in range(4))
    copies.settled.return_value = counts
    box = mailbox or Mailbox()
    return OrderHandler(0, 0, fetching, group, reducer, snapshots, copies, spans, box, journal, report)


@pytest.mark.parametrize(
    "error", [MemoryError(), fetch.NotFetched("all are gone"), OSError("full"), RuntimeError("a bug")]
)
async def test_whatever_ends_a_fetch_is_reported(tmp_path: Path, error: Exception) -> None:
    with mock.patch.object(orders, "AGAIN_S", 0.0):
        told: asyncio.Queue[object] = asyncio.Queue()
        snapshots: Any = mock.Mock()
        snapshots.allocate.side_effect = error
        one = handler(tmp_path, snapshots, told.put_nowait, within_s=1.0)
        one.handle(Fetch(BASE, (Member(1, "1-x-0", "contribute", ("",), ("127.0.0.1:1",)),)))
        async with asyncio.timeout(10):
            failed = await told.get()
        assert isinstance(failed, RankFetchFailed)
        assert failed.base == BASE
        assert failed.reason


async def test_copies_of_a_replica_that_is_wrong_are_dropped(tmp_path: Path) -> None:
    snapshots: Any = mock.Mock()
    handler(tmp_path, snapshots).handle(DropCopies((2, 3)))
    snapshots.order.assert_called_once_with(FreeCopies((2, 3)))
    snapshots.forget.assert_not_called()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("counts", [True, False])
async def test_the_agent_hears_of_each_state_whether_it_is_settled_or_never_will_be(tmp_path, counts, everywhere):
    snapshots: Any = mock.Mock()
    handler(tmp_path, snapshots, counts=counts).handle(Settled(BASE, everywhere))
    snapshots.order.assert_called_once_with(Settle(BASE, everywhere if counts else None))


async def test_what_others_fetch_without_a_ring_is_copied_and_kept(tmp_path: Path) -> None:
    snapshots: Any = mock.Mock()
    one = handler(tmp_path, snapshots)
    one.handle(Keep(BASE))
    snapshots.request.assert_called_once_with(BASE, 7.0)


@pytest.mark.parametrize(
    ("role", "others", "asked"),
    [
        ("contribute", "behind", True),
        ("standby", "behind", True),
        ("behind", "behind", False),
        ("standby", "standby", False),
    ],
)
async def test_who_holds_the_base_has_it_ready_for_those_behind(tmp_path, role, others, asked) -> None:
    snapshots: Any = mock.Mock()
    one = handler(tmp_path, snapshots)
    members = (Member(0, "0-x-0", role), Member(1, "1-x-0", others))
    one.handle(Configure(Grant(1, 2, BASE, members, 2, "why")))
    assert snapshots.request.called is asked
    assert snapshots.release.called is not asked


async def test_sums_of_a_lost_history_are_not_applied_to_the_step_that_takes_its_place(tmp_path: Path) -> None:
    mailbox = Mailbox()
    one = handler(tmp_path, mock.Mock(), mailbox=mailbox)
    one.handle(BufferUpdate(CommitRecord(1, 0, 3, "0" * 32, (0,), 2, (), "d")))
    one.handle(Commit(CommitRecord(2, 0, 3, "0" * 32, (1,), 2, (), "d")))
    assert isinstance(mailbox.get(), KeepOrder)
    apply = mailbox.get()
    assert isinstance(apply, ApplyOrder)
    assert apply.reduced is not None


class Away(torch.Tensor):
    """Stands for a tensor on a device."""

    is_cuda = True


def test_sums_whose_base_is_not_here_wait_in_pinned_memory_that_is_freed(mesh: DeviceMesh) -> None:
    one, plain = (OneRank(mesh, Config(replicas=2, ranks_per_replica=1)) for _ in range(2))
    record, pin = one.record(), mock.Mock()
    sums: list[torch.Tensor] = [torch.ones(n).as_subclass(Away) for n in one.adopted.sizes]
    with mock.patch.object(device, "pin", pin):
        one.driver.carry_out(KeepOrder(record.state_id, sums))
    one.runtime.reducer.give_back.assert_called_once_with(sums)
    for each in sums:
        each.zero_()  # by the next attempt
    assert pin.call_count == len(sums)
    pin.reset_mock()  # which has seen the memory
    one.driver.carry_out(ApplyOrder(record, None))
    plain.commit()
    assert all(torch.equal(p, plain.params[name]) for name, p in one.params.items())
    one.runtime.reset_mock()
    assert pin.return_value.call_count == len(sums)


def test_orders_come_in_order_between_two_threads_and_none_is_lost() -> None:
    mailbox, got = Mailbox(), []
    reader = threading.Thread(target=lambda: got.extend(mailbox.get() for _ in range(2000)))
    reader.start()
    for step in range(2000):
        mailbox.put(RunBatch(step))
    reader.join(10)
    assert got == [RunBatch(step) for step in range(2000)]
