"""The control channel between agents: frames, what is dropped and counted, what comes back after a restart."""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvctl_agent.protocol import codec
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.events import Received
from kvctl_agent.runtime.control_channel import ControlChannel, PeerAddress
from kvctl_agent.runtime.control_endpoints import connect
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.folded import folded

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def make(zmq_context: Context, telemetry: Telemetry) -> Iterator[Callable[..., ControlChannel]]:
    made: list[ControlChannel] = []

    def new(name: str, incarnation: int = 1, telemetry: Telemetry = telemetry) -> ControlChannel:
        made.append(ControlChannel(zmq_context, name, incarnation, telemetry))
        return made[-1]

    yield new
    for links in made:
        links.close()


@pytest.fixture
def served(make: Callable[..., ControlChannel], directory: Path) -> tuple[ControlChannel, str]:
    links = make("prefill-0", 7)
    return links, links.serve(f"ipc://{directory}/c")


def routed(
    links: ControlChannel, count: int, timeout_s: float = 60.0, sender: ControlChannel | None = None
) -> list[Received]:
    """What came, with the return addresses; `sender` sends what its socket had no space for."""
    got: list[Received] = []
    deadline = time.monotonic() + timeout_s
    while len(got) < count and time.monotonic() < deadline:
        if sender is not None:
            assert not list(sender.receive(sender.sockets()))
        got += links.receive(links.sockets())
        time.sleep(0.001)
    return got


def receive(
    links: ControlChannel, count: int, timeout_s: float = 60.0, sender: ControlChannel | None = None
) -> list[Received]:
    """What came, whatever the return addresses."""
    return [replace(received, route=b"") for received in routed(links, count, timeout_s, sender)]


def identity(name: bytes) -> bytes:
    """As an agent's connections have it."""
    return name + b"\0" + secrets.token_bytes(16)


def dropped(telemetry: Telemetry, reason: str) -> int:
    return int(telemetry.metrics.total("kvctl_control_dropped_total", reason))


def drained(room: int) -> msg.RoomDrained:
    return msg.RoomDrained(room, 1)


def test_what_is_queued_in_a_turn_travels_in_one_frame_and_in_order(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str]
) -> None:
    server, endpoint = served
    client = make("decode-0", 9)
    assert client.connect("prefill-0", endpoint)
    assert not client.connect("prefill-0", endpoint)
    assert client.endpoint("prefill-0") == endpoint
    for room in range(3):
        client.queue("prefill-0", drained(room))
    client.flush()
    got = routed(server, 3)
    route = got[0].route
    assert got == [Received("decode-0", 9, drained(room), route) for room in range(3)]
    server.queue("decode-0", drained(5), route)
    server.flush()
    assert receive(client, 1) == [Received("prefill-0", 7, drained(5))]


def test_what_nobody_waits_for_rides_along_or_leaves_soon(
    make: Callable[..., ControlChannel],
    served: tuple[ControlChannel, str],
    telemetry: Telemetry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, endpoint = served
    client = make("decode-0", 9)
    client.connect("prefill-0", endpoint)
    patient = msg.Ack(4, 1, "room-done")
    now = time.monotonic_ns()
    monkeypatch.setattr(telemetry.clock, "now_ns", lambda: now, raising=False)
    client.queue("prefill-0", patient)
    assert client.due_ns is not None
    client.flush()
    assert receive(server, 1, 0.002) == []  # too early, and nothing to ride with
    client.queue("prefill-0", drained(1))
    client.flush()
    assert [got.message for got in receive(server, 2)] == [patient, drained(1)]
    assert client.due_ns is None

    client.queue("prefill-0", patient)
    now = client.due_ns
    client.flush()
    assert [got.message for got in receive(server, 1)] == [patient]


def test_the_end_of_a_room_says_for_how_long_it_was_kept(
    make: Callable[..., ControlChannel],
    served: tuple[ControlChannel, str],
    telemetry: Telemetry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, endpoint = served
    client = make("decode-0", 9)
    client.connect("prefill-0", endpoint)
    now = time.monotonic_ns()
    monkeypatch.setattr(telemetry.clock, "now_ns", lambda: now, raising=False)
    client.queue("prefill-0", msg.RoomDone(4, 1))
    now += 700
    client.queue("prefill-0", msg.RoomDone(5, 1))
    assert client.waiting("prefill-0") == 2
    now += 5_000_000
    client.flush()
    done = [msg.RoomDone(4, 1, age_ns=5_000_700), msg.RoomDone(5, 1, age_ns=5_000_000)]
    assert [got.message for got in receive(server, 2)] == done


class RecordingChannel(ControlChannel):
    """Keeps the rooms of the messages of each frame, by address, in place of sending them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.left: dict[tuple[str, bytes], list[int]] = {}

    def _put(self, address: PeerAddress, frame: bytes, messages: int) -> None:
        _, decoded, _ = codec.decode(frame)
        self.left.setdefault(tuple(address), []).extend(message.room for message in decoded)  # type: ignore[union-attr]


_STEP = st.one_of(
    st.tuples(st.just("queue"), st.sampled_from([b"a", b"b"]), st.sampled_from([msg.RoomDone, msg.RoomDrained])),
    st.tuples(st.just("wait"), st.sampled_from([1_000_000, 5_000_000])),
    st.tuples(st.just("flush")),
)


@given(st.lists(_STEP, max_size=40))
def test_messages_over_one_connection_leave_in_their_order_and_in_time(steps: list[Any]) -> None:
    now = 1
    telemetry = Telemetry("here", "prefill")
    telemetry.clock.now_ns = lambda: now  # type: ignore[method-assign]
    channel = RecordingChannel(None, "decode-0", 1, telemetry)
    queued: dict[bytes, list[int]] = {b"a": [], b"b": []}
    since: dict[int, int] = {}  # when a patient message was queued
    urgent: set[int] = set()
    for room, step in enumerate(steps):
        if step[0] == "queue":
            queued[step[1]].append(room)
            if step[2] is msg.RoomDone:
                since[room] = now
            else:
                urgent.add(room)
            channel.queue("prefill-0", step[2](room, 1), step[1])
        elif step[0] == "wait":
            now += step[1]
        else:
            channel.flush()
            left = {room for rooms in channel.left.values() for room in rooms}
            assert urgent <= left
            assert all(room in left or now - at < 5_000_000 for room, at in since.items())
            assert (channel.due_ns is None) == (since.keys() <= left)
    channel.flush(everything=True)
    assert {key[1]: rooms for key, rooms in channel.left.items()} == {
        key: rooms for key, rooms in queued.items() if rooms
    }


def test_messages_queued_before_the_endpoint_is_known_leave_once_it_is(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str], telemetry: Telemetry
) -> None:
    """Such as the first Hello; without it a connection would take a second longer."""
    server, endpoint = served
    client = make("decode-0", 9)
    client.queue("prefill-0", drained(1))
    client.queue("prefill-0", msg.Ack(2, 1, "room-done"))
    client.connect("prefill-0", endpoint)
    client.queue("prefill-0", drained(3))
    client.flush()
    assert [got.message for got in receive(server, 3)] == [drained(1), msg.Ack(2, 1, "room-done"), drained(3)]
    assert dropped(telemetry, "unsent") == 0


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_connection_may_be_closed_by_whoever_takes_a_message_from_it(
    make: Callable[..., ControlChannel], directory: Path, scheme: str
) -> None:
    server, client = make("prefill-0", 7), make("decode-0", 9)
    endpoint = server.serve(f"ipc://{directory}/c" if scheme == "ipc" else "tcp://127.0.0.1:*")
    client.connect("prefill-0", endpoint)
    client.queue("prefill-0", drained(1))
    client.flush()
    (hello,) = routed(server, 1, sender=client)
    for room in range(3):
        server.queue("decode-0", drained(room), hello.route)
        server.flush()
    time.sleep(0.1)  # for all frames to have arrived
    got = []
    for close in (client.renew, client.disconnect):
        client.connect("prefill-0", endpoint)
        for received in client.receive(client.sockets()):
            got.append(received.message)
            close("prefill-0")
    assert got[0] == drained(0)


def test_a_message_to_nobody_is_counted_and_never_blocks(
    served: tuple[ControlChannel, str], telemetry: Telemetry
) -> None:
    server, _ = served
    server.queue("stranger", drained(1))
    server.queue("stranger", drained(2))
    server.flush()
    assert dropped(telemetry, "unsent") == 2


def test_a_message_to_a_peer_that_was_never_connected_is_counted(
    make: Callable[..., ControlChannel], telemetry: Telemetry
) -> None:
    client = make("decode-0")
    client.queue("prefill-9", drained(1))
    client.flush()
    assert dropped(telemetry, "unsent") == 1


def test_a_peer_that_does_not_read_costs_its_messages_and_no_time(
    make: Callable[..., ControlChannel], directory: Path, telemetry: Telemetry
) -> None:
    client = make("decode-0")
    directory.mkdir()
    with Socket(AF_UNIX) as listener:
        listener.bind(f"{directory}/mute")
        listener.listen()
        client.connect("prefill-0", f"ipc://{directory}/mute")
        started = time.monotonic()
        for room in range(25_000):
            client.queue("prefill-0", drained(room))
            client.flush()
        assert time.monotonic() - started < 60
    assert 0 < dropped(telemetry, "unsent") < 5_000, "of 25,000, 20,000 wait and the kernel holds some"
    assert dropped(telemetry, "absent") == 0


def test_of_the_messages_to_a_peer_that_does_not_listen_the_newest_waits(
    make: Callable[..., ControlChannel], directory: Path, telemetry: Telemetry
) -> None:
    client, server = make("decode-0"), make("prefill-0", 7)
    client.connect("prefill-0", f"ipc://{directory}/c")
    for room in range(100):
        client.queue("prefill-0", drained(room))
        client.flush()
    assert (dropped(telemetry, "unsent"), dropped(telemetry, "absent")) == (0, 100)
    server.serve(f"ipc://{directory}/c")
    assert [got.message for got in routed(server, 1, sender=client)] == [drained(99)]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b""], "malformed"),
        ([b"garbage"], "malformed"),
        ([codec.encode(1, [drained(1)]), b"second frame"], "malformed"),
        ([codec.MAGIC[:-1] + b"\xff" + bytes(8) + b"\x90"], "malformed"),
        ([codec.MAGIC + bytes(8) + b"\x81\xa1t\xa3ack"], "malformed"),
        ([codec.MAGIC + bytes(8) + b"\x91\x81\xa1t\xa8surprise"], "unknown-message"),
    ],
)
def test_what_is_no_control_message_is_counted_and_dropped(
    zmq_context: Context,
    served: tuple[ControlChannel, str],
    telemetry: Telemetry,
    frames: list[bytes],
    reason: str,
) -> None:
    server, endpoint = served
    stranger = connect(zmq_context, endpoint, identity(b"stranger"), 1 << 20)
    stranger.send_multipart(frames)
    stranger.send(codec.encode(3, [drained(1)]))
    assert receive(server, 1) == [Received("stranger", 3, drained(1))]
    assert dropped(telemetry, reason) == 1
    stranger.close()


def test_a_broken_peer_is_logged_once_a_minute_and_does_not_silence_others(
    zmq_context: Context, served: tuple[ControlChannel, str], telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, endpoint = served
    now = 10**12
    monkeypatch.setattr(telemetry.clock, "now_ns", lambda: now, raising=False)
    one, other = (connect(zmq_context, endpoint, identity(name), 1 << 20) for name in (b"one", b"other"))

    def provoke(socket: zmq.Socket[bytes]) -> list[tuple[str | None, str]]:
        for _ in range(20):
            socket.send(b"garbage")
        socket.send(codec.encode(3, [drained(1)]))
        assert receive(server, 1)
        return [(row["peer"], row["severity"]) for row in folded(telemetry).recorder.since(None, 100)["events"]]

    assert provoke(one) == [("one", "warning")]
    assert provoke(one) == [("one", "warning")]
    assert provoke(other) == [("one", "warning"), ("other", "warning")]
    now += 61 * 10**9
    assert provoke(one) == [("one", "warning"), ("other", "warning"), ("one", "warning")]
    assert dropped(telemetry, "malformed") == 80
    for socket in (one, other):
        socket.close()


def test_a_name_that_is_no_text_is_read_all_the_same(zmq_context: Context, served: tuple[ControlChannel, str]) -> None:
    server, endpoint = served
    stranger = connect(zmq_context, endpoint, identity(b"\xff\xfe"), 1 << 20)
    stranger.send(codec.encode(3, [drained(1)]))
    assert [got.incarnation for got in receive(server, 1)] == [3]
    stranger.close()


def opening(nbytes: int, room: int) -> msg.RoomOpen:
    return msg.RoomOpen(room, 1, bytes(nbytes), 0, nbytes // 4, {})


def test_many_large_messages_leave_in_frames_that_the_peer_accepts(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str], telemetry: Telemetry
) -> None:
    """40 openings of 131,072 pages are 20 MiB, above the limit of a frame, in one turn."""
    server, endpoint = served
    client = make("decode-0")
    client.connect("prefill-0", endpoint)
    for room in range(40):
        client.queue("prefill-0", opening(1 << 19, room))
    client.flush()
    got: list[Any] = [received.message for received in receive(server, 40, 10, client)]
    assert [message.room for message in got] == list(range(40))
    assert dropped(telemetry, "oversize") == 0


def test_a_message_that_no_frame_can_hold_is_counted_and_spoils_no_other(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str], telemetry: Telemetry
) -> None:
    """Sent anyway it would cost the connection: the peer's socket hangs up at its limit."""
    server, endpoint = served
    client = make("decode-0")
    client.connect("prefill-0", endpoint)
    client.queue("prefill-0", drained(1))
    client.queue("prefill-0", opening(codec.MAX_FRAME_BYTES + 4, 2))
    client.queue("prefill-0", drained(3))
    client.flush()
    assert [received.message for received in receive(server, 2, 10)] == [drained(1), drained(3)]
    assert dropped(telemetry, "oversize") == 1


@pytest.mark.parametrize("wrong", [np.int64(2), 1.5j, 1 << 64, "\ud800"], ids=repr)
def test_a_message_that_cannot_be_encoded_costs_itself(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str], telemetry: Telemetry, wrong: Any
) -> None:
    """It cost every message of its frame, and of the frames to other peers that were to follow."""
    server, endpoint = served
    client = make("decode-0")
    client.connect("prefill-0", endpoint)
    for room in (1, 2, wrong, 4, 5):
        client.queue("prefill-0", drained(room))
    assert [event.room for event in client.flush()] == [wrong]
    got: list[Any] = [received.message for received in receive(server, 4, 10)]
    assert [message.room for message in got] == [1, 2, 4, 5]
    assert dropped(telemetry, "unencodable") == 1
    client.queue("prefill-0", drained(wrong))
    client.flush()
    assert dropped(telemetry, "unencodable") == 2
    (entry,) = folded(telemetry).recorder.since(None, 10)["events"]  # one entry a minute and peer
    assert entry["text"].startswith("to prefill-0: RoomDrained cannot be encoded: ")
    assert entry["text"].encode()


def test_rooms_are_told_of_the_messages_that_can_never_be_sent(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str]
) -> None:
    client = make("decode-0")
    client.connect("prefill-0", served[1])
    client.queue("prefill-0", opening(codec.MAX_FRAME_BYTES + 4, 2))
    client.queue("prefill-0", msg.Watermark(1.5j, 0, 0))  # of no room
    (event,) = client.flush()
    assert (event.peer, event.room, event.nonce) == ("prefill-0", 2, 1)
    assert event.text.startswith("to prefill-0: RoomOpen of ")
    assert event.text.endswith(" bytes is too large to be sent")
    assert client.flush() == []


def test_a_frame_above_the_limit_never_reaches_the_loop(
    zmq_context: Context, served: tuple[ControlChannel, str]
) -> None:
    server, endpoint = served
    stranger = connect(zmq_context, endpoint, identity(b"stranger"), 1 << 20)
    stranger.send(bytes(codec.MAX_FRAME_BYTES + 1))
    other = connect(zmq_context, endpoint, identity(b"other"), 1 << 20)
    other.send(codec.encode(3, [drained(1)]))
    assert receive(server, 1) == [Received("other", 3, drained(1))]
    stranger.close()
    other.close()


def test_two_processes_under_one_name_are_both_heard_and_answered(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str]
) -> None:
    server, endpoint = served
    clients, routes = [make("decode-0", life) for life in (1, 2)], []
    for life, client in enumerate(clients, 1):
        client.connect("prefill-0", endpoint)
        client.queue("prefill-0", drained(life))
        client.flush()
        (got,) = routed(server, 1)
        assert (got.peer, got.incarnation) == ("decode-0", life)
        routes.append(got.route)
    assert routes[0] != routes[1]
    for life, (client, route) in enumerate(zip(clients, routes, strict=True), 1):
        server.queue("decode-0", drained(10 + life), route)
        server.flush()
        assert receive(client, 1) == [Received("prefill-0", 7, drained(10 + life))]


@pytest.mark.parametrize("name", [b"decode-0", b"decode-0\0", b"decode-0\0short", b"decode-0\0" + bytes(17)])
def test_who_connects_under_a_peers_name_takes_nothing_of_it(
    zmq_context: Context,
    make: Callable[..., ControlChannel],
    served: tuple[ControlChannel, str],
    telemetry: Telemetry,
    name: bytes,
) -> None:
    server, endpoint = served
    client = make("decode-0", 9)
    client.connect("prefill-0", endpoint)
    client.queue("prefill-0", drained(1))
    client.flush()
    (got,) = routed(server, 1)
    stranger = connect(zmq_context, endpoint, name, 1 << 20)
    stranger.send(codec.encode(9, [drained(2)]))
    deadline = time.monotonic() + 60
    while not dropped(telemetry, "stranger"):
        assert time.monotonic() < deadline, "the stranger's frame never came"
        assert receive(server, 1, 0.01) == []
    server.queue("decode-0", drained(3), got.route)
    server.flush()
    assert receive(client, 1) == [Received("prefill-0", 7, drained(3))]
    assert not stranger.poll(50)
    stranger.close()


def test_a_connection_that_is_renewed_is_the_same_one_to_the_other_side(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str]
) -> None:
    server, endpoint = served
    client = make("decode-0", 9)
    client.connect("prefill-0", endpoint)
    routes = set()
    for _ in range(3):
        client.queue("prefill-0", drained(1))
        client.flush()
        routes.add(routed(server, 1)[0].route)
        client.renew("prefill-0")
    assert len(routes) == 1


def test_a_peer_that_moved_is_connected_anew(make: Callable[..., ControlChannel], directory: Path) -> None:
    client = make("decode-0")
    for life in (1, 2):
        server = make("prefill-0", life)
        assert client.connect("prefill-0", server.serve(f"ipc://{directory}/{life}"))
        client.queue("prefill-0", drained(life))
        client.flush()
        assert receive(server, 1) == [Received("decode-0", 1, drained(life))]


def test_a_flood_is_read_in_turns(make: Callable[..., ControlChannel], served: tuple[ControlChannel, str]) -> None:
    server, endpoint = served
    client = make("decode-0")
    client.connect("prefill-0", endpoint)
    for room in range(1000):
        client.queue("prefill-0", drained(room))
        client.flush()
    deadline = time.monotonic() + 60
    while not (first := len(list(server.receive(server.sockets())))):
        assert time.monotonic() < deadline, "nothing arrives"
        time.sleep(0.2)  # for as much as a turn could take, and more
    assert first <= 256
    assert first + len(receive(server, 1000 - first, sender=client)) == 1000


def test_a_rank_that_left_leaves_nothing_and_is_met_again_as_a_new_one(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str], telemetry: Telemetry
) -> None:
    server, endpoint = served
    client = make("decode-0")
    client.connect("prefill-0", endpoint)
    before = len(client.sockets())
    for life in range(50):
        changes = client.changes
        client.connect(f"gone-{life}", f"{endpoint}-{life}")
        client.queue(f"gone-{life}", drained(1))
        client.queue(f"gone-{life}", msg.Ack(1, 1, "room-done"))
        client.disconnect(f"gone-{life}")
        assert client.changes == changes + 2
        assert client.endpoint(f"gone-{life}") == ""
    client.flush(everything=True)
    assert dropped(telemetry, "unsent") == 0
    assert len(client.sockets()) == before
    client.disconnect("nobody")

    client.disconnect("prefill-0")
    assert client.connect("prefill-0", endpoint)
    client.queue("prefill-0", drained(2))
    client.flush()
    assert receive(server, 1) == [Received("decode-0", 1, drained(2))]


def test_without_a_descriptor_for_a_new_connection_the_old_one_stays(
    make: Callable[..., ControlChannel], served: tuple[ControlChannel, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, endpoint = served
    client = make("decode-0")
    client.connect("prefill-0", endpoint)

    def no_descriptor(*_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr("kvctl_agent.runtime.control_endpoints.connect_to_peer", no_descriptor)
    with pytest.raises(zmq.ZMQError):
        client.renew("prefill-0")
    client.queue("prefill-0", drained(1))
    client.flush()
    assert [received.message for received in receive(server, 1)] == [drained(1)]
