"""Frames on a bad line: each fault does what it says, to what leaves and to what arrives, and to nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvctl.lab.faults.control_channel import FaultyControlChannel
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_fault
from kvctl_agent.protocol import messages as msg
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.telemetry.hub import Telemetry

MS = 1_000_000
BURST = 200


def rooms(links: ControlChannel) -> list[int]:
    """What has come in by now."""
    messages = [received.message for received in links.receive(links.sockets())]
    return [message.room for message in messages if isinstance(message, msg.RoomDrained)]


class Pair:
    """A decode rank's links with faults, connected to a prefill rank's without."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path) -> None:
        self.faults = FaultInjector("decode-0", seed=4)
        self.heard_by = {name: _telemetry(name) for name in ("prefill-0", "decode-0")}
        self.good = ControlChannel(context, "prefill-0", 7, self.heard_by["prefill-0"])
        self.bad = FaultyControlChannel(self.faults, context, "decode-0", 9, self.heard_by["decode-0"])
        self.bad.connect("prefill-0", self.good.serve(f"ipc://{directory}/c"))
        self.send(self.bad, "prefill-0", [0])
        deadline = time.monotonic() + 60
        while not (first := list(self.good.receive(self.good.sockets()))):
            assert time.monotonic() < deadline, "the first message never came"
            time.sleep(0.001)
        self.route = first[0].route  # the way back

    def send(self, links: ControlChannel, peer: str, rooms: list[int], route: bytes = b"") -> None:
        """A frame for each room."""
        for room in rooms:
            links.queue(peer, msg.RoomDrained(room, 1), route)
            links.flush()

    def out(self, count: int = BURST) -> None:
        self.send(self.bad, "prefill-0", list(range(count)))

    def back(self, count: int = BURST) -> None:
        self.send(self.good, "decode-0", list(range(count)), self.route)

    def hear(self, links: ControlChannel, count: int, timeout_s: float = 60.0) -> list[int]:
        """Rooms in the order in which they were heard of, until there are so many."""
        heard: list[int] = []
        deadline = time.monotonic() + timeout_s
        while len(heard) < count and time.monotonic() < deadline:
            self.bad.flush()
            heard += rooms(links)
            time.sleep(0.001)
        return heard

    def dropped(self, name: str, reason: str) -> int:
        return int(self.heard_by[name].metrics.total("kvctl_control_dropped_total", reason))

    def struck(self, name: str) -> int:
        return self.faults.counts().get(name, 0)


def _telemetry(name: str) -> Telemetry:
    return Telemetry(name, "prefill")


@pytest.fixture
def pair(no_leaks: None, socket_dir: Path) -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Pair(context, socket_dir)
    yield made
    made.bad.close()
    made.good.close()
    context.destroy(0)


def both(function: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("outgoing", [True, False], ids=["out", "in"])(function)


def burst(pair: Pair, outgoing: bool) -> ControlChannel:
    """Sends frames from one to the other; who hears them."""
    if outgoing:
        pair.out()
        return pair.good
    pair.back()
    return pair.bad


@both
def test_without_a_fault_every_frame_comes_once_and_in_order(pair: Pair, outgoing: bool) -> None:
    listener = burst(pair, outgoing)
    assert pair.hear(listener, BURST) == list(range(BURST))
    assert pair.hear(listener, 1, timeout_s=0.05) == []


@both
def test_loss(pair: Pair, outgoing: bool) -> None:
    pair.faults.set(parse_fault("control-loss=25%"))
    listener = burst(pair, outgoing)
    heard: list[int] = []
    deadline = time.monotonic() + 60
    while len(heard) + pair.struck("control-loss") < BURST:  # an incoming frame is lost when it is read
        assert time.monotonic() < deadline, "frames are neither heard nor lost"
        heard += pair.hear(listener, 1, timeout_s=0.01)
    assert 20 < pair.struck("control-loss") < 90
    assert heard == sorted(heard)
    assert pair.hear(listener, 1, timeout_s=0.05) == []


@both
def test_messages_of_one_type_are_lost_and_their_frames_are_not(pair: Pair, outgoing: bool) -> None:
    pair.faults.set(parse_fault("message-loss=room-done+watermark"))
    sender, peer, route = (pair.bad, "prefill-0", b"") if outgoing else (pair.good, "decode-0", pair.route)
    listener = pair.good if outgoing else pair.bad
    beat = msg.Heartbeat(5, watermark=[1, 2, 3])
    for message in (msg.Watermark(1, 2, 3), msg.RoomDrained(1, 1), beat, msg.RoomDrained(2, 1)):
        sender.queue(peer, message, route)
    sender.queue(peer, msg.RoomDone(1, 1), route)
    sender.flush(everything=True)
    heard: list[msg.Message] = []
    deadline = time.monotonic() + 60
    while not heard:
        assert time.monotonic() < deadline, "the frame never came"
        heard = [received.message for received in listener.receive(listener.sockets())]
    assert heard == [msg.RoomDrained(1, 1), msg.Heartbeat(5), msg.RoomDrained(2, 1)]
    assert pair.struck("message-loss") == 3
    pair.faults.clear()
    assert pair.hear(burst(pair, outgoing), BURST) == list(range(BURST))


@both
def test_duplicates_come_later(pair: Pair, outgoing: bool) -> None:
    pair.faults.set(parse_fault("control-dup=25%"))
    listener = burst(pair, outgoing)
    first = pair.hear(listener, BURST)
    heard = first + pair.hear(listener, BURST + pair.struck("control-dup") - len(first))
    assert 20 < pair.struck("control-dup") < 90
    assert len(heard) == BURST + pair.struck("control-dup")
    assert set(heard) == set(range(BURST))


@both
def test_reordered_frames_all_come(pair: Pair, outgoing: bool) -> None:
    pair.faults.set(parse_fault("control-reorder=25%"))
    heard = pair.hear(burst(pair, outgoing), BURST)
    assert sorted(heard) == list(range(BURST))
    assert heard != sorted(heard)


@both
def test_delay_keeps_the_order(pair: Pair, outgoing: bool) -> None:
    pair.faults.set(parse_fault("control-delay=60ms"))
    began = time.monotonic()
    listener = burst(pair, outgoing)
    heard: list[int] = []
    while (due := pair.bad.due_ns) is None:  # an incoming frame meets its fate when it is read
        assert time.monotonic() < began + 60, "nothing is held back"
        heard += pair.hear(listener, 1, timeout_s=0.01)
    assert due < time.monotonic_ns() + 60 * MS
    assert heard + pair.hear(listener, BURST - len(heard)) == list(range(BURST))
    assert time.monotonic() - began >= 0.06
    assert pair.struck("control-delay") == BURST
    assert pair.bad.due_ns is None


@both
@pytest.mark.parametrize("spec", ["control-truncate=30%", "control-garbage=30%"])
def test_broken_frames_are_dropped_and_counted(pair: Pair, outgoing: bool, spec: str) -> None:
    pair.faults.set(parse_fault(spec))
    listener = burst(pair, outgoing)
    who, kind = "prefill-0" if outgoing else "decode-0", spec.partition("=")[0]

    def over() -> bool:
        # Random bytes behind a true header may happen to be an empty list of messages, or one of unknown ones.
        dropped = pair.dropped(who, "malformed") + pair.dropped(who, "unknown-message")
        return len(heard) >= BURST - pair.struck(kind) and dropped > 0.9 * pair.struck(kind)

    heard: list[int] = []
    deadline = time.monotonic() + 60
    while not over():  # an incoming frame is broken when it is read
        assert time.monotonic() < deadline, "frames are neither heard nor dropped"
        heard += pair.hear(listener, 1, timeout_s=0.01)
    assert 20 < pair.struck(kind) < 110
    assert len(heard) == BURST - pair.struck(kind)


def test_what_is_held_back_leaves_before_the_sockets_close(pair: Pair) -> None:
    pair.faults.set(parse_fault("control-delay=30s"))
    pair.out(5)
    pair.bad.flush(everything=True)
    assert pair.hear(pair.good, 5) == list(range(5))
