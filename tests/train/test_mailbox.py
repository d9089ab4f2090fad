from __future__ import annotations

import threading
import time

from ft_hsdp.core.effects import DropGradient, Exit, RunBatch
from ft_hsdp.train.orders import Mailbox, Order


def test_orders_come_in_the_order_in_which_they_were_put() -> None:
    mailbox = Mailbox()
    orders: list[Order] = [RunBatch(1), DropGradient("why"), RunBatch(2), Exit(0, "done")]
    for order in orders:
        mailbox.put(order)
    assert [mailbox.get() for _ in orders] == orders


def test_get_waits_for_an_order_of_another_thread() -> None:
    mailbox = Mailbox()
    thread = threading.Timer(0.1, mailbox.put, (RunBatch(3),))
    began = time.monotonic()
    thread.start()
    assert mailbox.get() == RunBatch(3)
    assert time.monotonic() - began >= 0.09
    thread.join()


def test_nothing_is_lost_between_two_threads() -> None:
    mailbox, got = Mailbox(), []
    reader = threading.Thread(target=lambda: got.extend(mailbox.get() for _ in range(2000)))
    reader.start()
    for step in range(2000):
        mailbox.put(RunBatch(step))
    reader.join(10)
    assert got == [RunBatch(step) for step in range(2000)]
