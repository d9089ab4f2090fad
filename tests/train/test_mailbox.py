from __future__ import annotations

import threading
import time

from ft_hsdp.train.orders import DropOrder, EndOrder, Letter, Mailbox, RunBatchOrder


def test_letters_come_in_the_order_in_which_they_were_put() -> None:
    mailbox = Mailbox()
    letters: list[Letter] = [RunBatchOrder(1), DropOrder("why"), RunBatchOrder(2), EndOrder(0, "done")]
    for letter in letters:
        mailbox.put(letter)
    assert [mailbox.get() for _ in letters] == letters


def test_get_waits_for_a_letter_of_another_thread() -> None:
    mailbox = Mailbox()
    thread = threading.Timer(0.1, mailbox.put, (RunBatchOrder(3),))
    began = time.monotonic()
    thread.start()
    assert mailbox.get() == RunBatchOrder(3)
    assert time.monotonic() - began >= 0.09
    thread.join()


def test_nothing_is_lost_between_two_threads() -> None:
    mailbox, got = Mailbox(), []
    reader = threading.Thread(target=lambda: got.extend(mailbox.get() for _ in range(2000)))
    reader.start()
    for step in range(2000):
        mailbox.put(RunBatchOrder(step))
    reader.join(10)
    assert got == [RunBatchOrder(step) for step in range(2000)]
