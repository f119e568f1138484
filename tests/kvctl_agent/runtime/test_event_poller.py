"""The engine's events: what it says of a room is passed on in order, once its forwards are done, and nothing blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import DeviceError, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.runtime.event_poller import EventPoller
from kvctl_agent.runtime.handles import PoolLimits, Receive, Send
from tests.support.driven_task import DrivenTask
from tests.support.host_device import HostDevice, HostEvent
from tests.support.polling import until
from tests.support.regions import REGION

BOUNDS = PoolLimits(
    num_pages=10_000, aux_slots=4, layers=range(8), state_slots=(), group_slots=(), group_tokens=(), page_tokens=16
)
NEVER = 1 << 60


class Posted(list[Any]):
    """The mailbox, without what is said of launches."""

    def put(self, event: ev.Event) -> None:
        if not isinstance(event, ev.Launched):
            self.append(event)

    def wait(self, count: int) -> list[Any]:
        until(lambda: len(self) >= count)
        return list(self)


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


def poller(device: HostDevice) -> tuple[EventPoller, DrivenTask]:
    """A poller, and the thread that stands for the control loop."""
    made = EventPoller(device, lambda: driven.wake())
    driven = DrivenTask(made)
    return made, driven


@pytest.fixture
def resting(device: HostDevice) -> Iterator[tuple[EventPoller, DrivenTask]]:
    """A poller whose thread the test starts."""
    made, driven = poller(device)
    yield made, driven
    made.close()
    assert driven.close(30)


@pytest.fixture
def forwards(resting: tuple[EventPoller, DrivenTask]) -> EventPoller:
    made, driven = resting
    driven.start()
    return made


@pytest.fixture
def posted() -> Posted:
    return Posted()


@pytest.fixture
def send(posted: Posted, forwards: EventPoller) -> Send:
    return Send(7, posted.put, REGION, BOUNDS, forwards)


def end(event: HostEvent) -> None:
    """The device has come so far."""
    event.finish()


class TestOrder:
    def test_nothing_is_waited_for_where_no_event_is_given(self, send: Send, posted: Posted) -> None:
        send.pages([1])
        send.pages([2], last=True)
        send.finish(aux_index=3)
        assert [type(each) for each in posted] == [ev.SendPages, ev.SendPages, ev.Finish]

    def test_pages_are_passed_on_once_their_event_is_done(self, send: Send, posted: Posted, device: HostDevice) -> None:
        event = device.engine_event(slow=NEVER)
        send.pages([1, 2], event=event)
        time.sleep(0.02)
        assert posted == []
        ended_ns = time.monotonic_ns()
        end(event)
        (pages,) = posted.wait(1)
        assert (pages.pages.tolist(), pages.last, pages.layers, pages.launched) == ([1, 2], False, None, True)
        assert ended_ns <= pages.at_ns <= time.monotonic_ns()

    def test_page_numbers_that_the_device_knows_are_read_once_the_event_is_done(
        self, send: Send, posted: Posted, device: HostDevice
    ) -> None:
        event, numbers = device.engine_event(slow=NEVER), [0, 0]
        send.pages(lambda: numbers, last=True, event=event)
        send.finish()
        numbers[:] = [3, 4]
        end(event)
        pages, _ = posted.wait(2)
        assert (pages.pages.tolist(), pages.last) == ([3, 4], True)

    @pytest.mark.parametrize("numbers", [[10_000], ["x"], None])
    def test_bad_page_numbers_fail_the_room(
        self, send: Send, posted: Posted, device: HostDevice, numbers: object
    ) -> None:
        event = device.engine_event(slow=NEVER)
        send.layers(range(4), lambda: numbers, event=event)
        end(event)
        (failed,) = posted.wait(1)
        assert isinstance(failed, ev.ForwardFailed)
        assert "page" in failed.text

    def test_page_numbers_that_nobody_knows_yet_need_an_event(self, send: Send) -> None:
        with pytest.raises(LocalProtocolError, match="need event="):
            send.pages(lambda: [1])

    def test_what_follows_waits_behind(self, send: Send, posted: Posted, device: HostDevice) -> None:
        first, third = (device.engine_event(slow=NEVER) for _ in range(2))
        send.pages([1], event=first)
        send.pages([2])
        send.layers(range(4), [3], last=False, event=third)
        send.layers(range(4, 8), [3], last=True)
        send.finish(aux_index=2)
        end(third)
        time.sleep(0.01)
        assert posted == []
        end(first)
        said = posted.wait(5)
        assert [each.pages.tolist() for each in said[:4]] == [[1], [2], [3], [3]]
        assert [each.layers for each in said[:4]] == [None, None, (0, 4), (4, 8)]
        assert [each.launched for each in said[:4]] == [True, False, True, False]
        assert said[4].aux_index == 2
        assert [each.at_ns for each in said] == sorted(each.at_ns for each in said)

    def test_an_event_of_a_whole_batch_is_asked_once_a_look(
        self, forwards: EventPoller, posted: Posted, device: HostDevice
    ) -> None:
        event = Counted(device)
        for number in range(50):
            Send(number, posted.put, REGION, BOUNDS, forwards).pages([number], event=event.given)
        event.pass_after(20)
        assert sorted(each.room for each in posted.wait(50)) == list(range(50))
        assert event.asked <= event.enough + 50  # the last look asks for each room

    def test_an_event_may_be_recorded_anew_while_it_is_looked_at(
        self, resting: tuple[EventPoller, DrivenTask], posted: Posted, device: HostDevice
    ) -> None:
        """For a later forward of the same stream: what was seen of the earlier one says nothing of that."""
        forwards, driven = resting
        event, between = device.engine_event(slow=NEVER), device.engine_event(slow=NEVER)
        done = threading.Event()
        event.done = done.is_set  # type: ignore[method-assign]
        first, second = (Send(number, posted.put, REGION, BOUNDS, forwards) for number in (7, 8))

        def record_anew() -> bool:
            if not done.is_set():
                return False
            done.clear()
            second.pages([3], event=event)
            return True

        between.done = record_anew  # type: ignore[method-assign]
        first.pages([1], event=event)
        second.pages([2], event=between)
        driven.start()  # nobody looks before both are there
        done.set()
        said = posted.wait(2)
        time.sleep(0.02)
        assert [each.pages.tolist() for each in said] == [[1], [2]]
        assert len(posted) == 2, "its forward still runs"
        done.set()
        assert posted.wait(3)[2].pages.tolist() == [3]

    def test_the_control_loop_is_told_of_a_launch_at_once(self, forwards: EventPoller, device: HostDevice) -> None:
        everything: list[ev.Event] = []
        send = Send(7, everything.append, REGION, BOUNDS, forwards)
        send.pages([1], event=device.engine_event(slow=NEVER))
        assert everything == [ev.Launched(7)]

    def test_a_prefetch_waits_for_nothing(self, send: Send, posted: Posted, device: HostDevice) -> None:
        send.pages([1], event=device.engine_event(slow=NEVER))
        send.prefetch()
        assert [type(each) for each in posted] == [ev.Prefetch]


class Counted:
    """An event of the engine that counts who asks."""

    def __init__(self, device: HostDevice) -> None:
        self.given = device.engine_event(slow=NEVER)
        self.asked = 0
        self.enough = NEVER
        self._inner = self.given.done
        self.given.done = self.done  # type: ignore[method-assign]

    def pass_after(self, more: int) -> None:
        self.enough = self.asked + more

    def done(self) -> bool:
        self.asked += 1
        if self.asked >= self.enough:
            self.given.finish()
        return self._inner()


class TestEnds:
    def test_a_room_that_ended_says_no_more(self, send: Send, posted: Posted, device: HostDevice) -> None:
        event = device.engine_event(slow=NEVER)
        send.pages([1], last=True, event=event)
        send.finish()
        send.change_state(RoomState.FAILED, None)
        send.release()
        end(event)
        time.sleep(0.01)
        assert posted == []

    def test_nor_of_launches(self, forwards: EventPoller, device: HostDevice) -> None:
        everything: list[ev.Event] = []
        send = Send(7, everything.append, REGION, BOUNDS, forwards)
        send.change_state(RoomState.FAILED, None)
        send.pages([1], event=device.engine_event(slow=NEVER))
        assert everything == []

    def test_nothing_is_kept_of_it(self, forwards: EventPoller, send: Send, device: HostDevice) -> None:
        send.pages([1], event=device.engine_event(slow=NEVER))
        assert forwards.waiting == 1
        send.change_state(RoomState.FAILED, None)
        until(lambda: forwards.waiting == 0)

    def test_its_number_may_be_another_rooms_by_then(
        self, forwards: EventPoller, posted: Posted, device: HostDevice
    ) -> None:
        old, event = Send(7, posted.put, REGION, BOUNDS, forwards), device.engine_event(slow=NEVER)
        old.pages([1], event=event)
        old.change_state(RoomState.FAILED, None)
        new = Send(7, posted.put, REGION, BOUNDS, forwards)
        new.pages([2], event=event)
        end(event)
        assert [each.pages.tolist() for each in posted.wait(1)] == [[2]]
        time.sleep(0.01)
        assert len(posted) == 1

    def test_a_forward_that_fails_fails_its_room(self, send: Send, posted: Posted, device: HostDevice) -> None:
        event = device.engine_event(slow=2)
        event.failure = DeviceError("an illegal address was met")
        send.pages([1], event=event)
        send.finish()
        (failed,) = posted.wait(1)
        assert failed == ev.ForwardFailed(7, "its forward failed: an illegal address was met")
        time.sleep(0.01)
        assert len(posted) == 1

    def test_a_bug_costs_one_room(self, forwards: EventPoller, posted: Posted, device: HostDevice) -> None:
        broken = device.engine_event()
        broken.done = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        Send(7, posted.put, REGION, BOUNDS, forwards).pages([1], event=broken)
        (failed,) = posted.wait(1)
        assert failed.text == "its forward failed: ZeroDivisionError: integer division or modulo by zero"
        Send(8, posted.put, REGION, BOUNDS, forwards).pages([1], event=device.engine_event())
        assert posted.wait(2)[1].room == 8

    def test_close_drops_what_is_waited_for(self, device: HostDevice, posted: Posted) -> None:
        forwards, driven = poller(device)
        driven.start()
        event = device.engine_event(slow=NEVER)
        send = Send(7, posted.put, REGION, BOUNDS, forwards)
        send.pages([1], event=event)
        forwards.close()
        assert forwards.waiting == 0
        end(event)
        send.pages([2], event=event)
        assert posted == []
        assert driven.close(30)


class TestRecall:
    def test_reports_that_wait_are_dropped_and_later_ones_wait_for_their_own_events(
        self, send: Send, device: HostDevice, posted: Posted
    ) -> None:
        first, second = (device.engine_event(slow=NEVER) for _ in range(2))
        send.pages([1], event=first)
        send.finish()
        send.recall()
        assert posted == [ev.Recall(7, 1)]
        send.pages([2], last=True, event=second)
        end(first)
        end(second)
        report = posted.wait(2)[1]
        assert report.pages.tolist() == [2]

    def test_a_forward_that_fails_after_the_recall_fails_nothing(
        self, send: Send, device: HostDevice, posted: Posted
    ) -> None:
        lost, later = (device.engine_event(slow=NEVER) for _ in range(2))
        send.pages([1], event=lost)
        send.recall()
        lost.failure = DeviceError("an illegal memory access was encountered")
        send.pages([2], event=later)
        end(lost)
        end(later)
        assert [type(event) for event in posted.wait(2)] == [ev.Recall, ev.SendPages]


class TestCost:
    def test_no_look_while_nothing_is_waited_for(
        self, send: Send, posted: Posted, device: HostDevice, at_best: Any
    ) -> None:
        send.pages([1], event=device.engine_event(slow=3))
        posted.wait(1)

        def used() -> float:
            before = time.process_time()
            time.sleep(0.1)
            return time.process_time() - before

        at_best(used, 0.005)

    def test_the_engine_is_not_kept(self, send: Send, device: HostDevice, at_best: Any) -> None:
        event = device.engine_event(slow=NEVER)

        def call() -> float:
            before = time.perf_counter()
            send.pages([1], event=event)
            return time.perf_counter() - before

        at_best(call, 100e-6)


class TestWrongCalls:
    def test_an_event_with_a_pool_in_host_memory(self, posted: Posted, device: HostDevice) -> None:
        send = Send(7, posted.put, REGION, BOUNDS)
        with pytest.raises(
            LocalProtocolError, match="room 7: event= is for pools on a device, this one is host memory"
        ):
            send.pages([1], last=True, event=device.engine_event())
        assert posted == []
        send.pages([1], last=True)

    def test_what_is_no_event(self, send: Send, posted: Posted) -> None:
        with pytest.raises(LocalProtocolError, match="room 7: event: str is no event of this device"):
            send.pages([1], last=True, event="done")
        with pytest.raises(LocalProtocolError, match="room 7: event: str is no event of this device"):
            send.layers(range(4), [1], last=True, event="done")
        assert posted == []
        send.pages([1], last=True)

    def test_fake_rooms_take_events_too(self, forwards: EventPoller, posted: Posted, device: HostDevice) -> None:
        send = Send(7, posted.put, REGION, BOUNDS, forwards)
        send.change_state(RoomState.SUCCESS, None)
        send.pages([1], last=True, event=device.engine_event(slow=NEVER))
        send.finish()
        until(lambda: forwards.waiting == 0)
        assert posted == []


class TestReceive:
    def test_after_success_there_is_an_event_to_wait_for(self, device: HostDevice) -> None:
        receive = Receive(7, lambda event: None, REGION, device)
        receive.change_state(RoomState.TRANSFERRING, None)
        assert receive.event is None
        receive.change_state(RoomState.SUCCESS, None)
        event = receive.event
        assert event is not None
        assert event.done()
        assert receive.event is event
        stream = object()
        event.wait(stream)
        assert event.streams == [stream]  # type: ignore[attr-defined]

    def test_there_is_none_after_a_failure(self, device: HostDevice) -> None:
        receive = Receive(7, lambda event: None, REGION, device)
        receive.change_state(RoomState.FAILED, None)
        assert receive.event is None


def test_a_wait_that_looks_at_events_needs_no_polls(
    resting: tuple[EventPoller, DrivenTask], posted: Posted, device: HostDevice
) -> None:
    poller, _ = resting
    device.event_query = 1
    assert list(poller.events()) == []
    shared, own = (device.engine_event(slow=NEVER) for _ in range(2))
    for room, event in ((1, shared), (2, shared), (3, own)):
        Send(room, posted.put, REGION, BOUNDS, poller).pages([1], event=event)
    assert {id(event) for event in poller.events()} == {id(shared), id(own)}
    assert len(poller.events()) == 2
    assert poller.wait_s() >= 0.001
    end(shared)
    poller.turn()
    assert [each.room for each in posted if isinstance(each, ev.SendPages)] == [1, 2]
    assert [id(event) for event in poller.events()] == [id(own)]
    end(own)
    poller.turn()
    assert list(poller.events()) == []
