"""The mailbox: no event is lost or reordered, every put wakes the loop, and a taken mailbox lets the loop sleep."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvctl_agent import gil
from kvctl_agent.protocol import events as ev
from kvctl_agent.runtime.control_loop import Mailbox


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def readable(mailbox: Mailbox, timeout_s: float = 0.0) -> bool:
    return bool(select.select([mailbox], [], [], timeout_s)[0])


def rooms(events: list[ev.Event]) -> list[int]:
    return [event.room for event in events if isinstance(event, ev.SendRoom)]


def test_events_come_out_once_and_in_order(mailbox: Mailbox) -> None:
    assert not readable(mailbox)
    mailbox.put(ev.SendRoom(1), ev.SendRoom(2))
    mailbox.put(ev.SendRoom(3))
    assert readable(mailbox)
    assert rooms(mailbox.take()) == [1, 2, 3]
    assert mailbox.take() == []
    assert not readable(mailbox)


def test_wake_alone_wakes(mailbox: Mailbox) -> None:
    mailbox.wake()
    assert readable(mailbox)
    assert mailbox.take() == []
    assert not readable(mailbox)


def test_a_batch_wakes_once_at_its_end_even_if_it_fails(mailbox: Mailbox) -> None:
    def fail() -> None:
        with mailbox.batch():
            mailbox.put(ev.SendRoom(1))
            mailbox.wake()
            assert not readable(mailbox)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert readable(mailbox)
    assert rooms(mailbox.take()) == [1]
    with mailbox.batch():
        pass
    assert not readable(mailbox), "nothing was put"


def test_a_batch_inside_a_batch_ends_with_it(mailbox: Mailbox) -> None:
    with mailbox.batch():
        with mailbox.batch():
            mailbox.put(ev.SendRoom(1))
        assert not readable(mailbox)
    assert readable(mailbox)


def test_a_batch_of_one_thread_delays_no_event_of_another(mailbox: Mailbox) -> None:
    with mailbox.batch():
        mailbox.put(ev.SendRoom(1))
        other = threading.Thread(target=mailbox.put, args=(ev.SendRoom(2),))
        other.start()
        other.join()
        assert readable(mailbox)
        assert rooms(mailbox.take()) == [1, 2]
    assert readable(mailbox), "the loop looks once more, for nothing"


def test_after_close_puts_are_dropped_and_closing_twice_is_fine() -> None:
    mailbox = Mailbox()
    mailbox.close()
    mailbox.close()
    mailbox.put(ev.SendRoom(1))


def test_many_producers_lose_no_event_and_no_wake_up(mailbox: Mailbox) -> None:
    """The consumer only looks when it is woken, as the loop does: a lost wake-up would leave it asleep."""
    producers, each = 8, 3000
    got: list[list[int]] = [[] for _ in range(producers)]
    start = threading.Barrier(producers + 1)

    def produce(number: int) -> None:
        start.wait()
        for turn in range(each):
            mailbox.put(ev.SendRoom(number * each + turn))

    threads = [threading.Thread(target=produce, args=(number,)) for number in range(producers)]
    for thread in threads:
        thread.start()
    start.wait()
    seen, deadline = 0, time.monotonic() + 60
    while seen < producers * each:
        assert readable(mailbox, deadline - time.monotonic()), f"asleep with {producers * each - seen} events to come"
        for room in rooms(mailbox.take()):
            got[room // each].append(room % each)
            seen += 1
    for thread in threads:
        thread.join()
    assert got == [list(range(each))] * producers
    # A last wake-up may come after its event was taken, but only one.
    mailbox.take()
    assert not readable(mailbox)


def test_a_take_between_the_two_steps_of_a_waker_leaves_nothing_readable(
    mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the loop, which polls the descriptor, would spin until somebody else happens to wake it."""
    write = gil.eventfd_write
    taken = threading.Event()
    taker: list[threading.Thread] = []

    def slow_write(fd: int) -> None:
        taker.append(threading.Thread(target=lambda: (mailbox.take(), taken.set())))
        taker[0].start()
        taken.wait(0.05)  # the take may have to wait for us
        write(fd)

    monkeypatch.setattr(gil, "eventfd_write", slow_write)
    mailbox.put(ev.SendRoom(1))
    monkeypatch.undo()
    taker[0].join()
    mailbox.take()
    assert not readable(mailbox)
