"""A rank's end of the channel: commands in, answers out, and the bench's end noticed exactly when it matters."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from kvctl.lab.ranks.messages import LineBuffer, LineTooLong, Room, Run, Verify
from kvctl.lab.ranks.server import Channel, parse_command
from kvctl_agent.errors import RemoteProtocolError


class Bench:
    """The other end."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        self.gone = threading.Event()
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel = Channel(theirs.detach(), self.inbox, on_gone=self.gone.set)

    def tell(self, command: Any) -> None:
        self.socket.sendall(orjson.dumps({"do": command.do, "args": command}) + b"\n")

    def heard(self) -> Any:
        data = b""
        while not data.endswith(b"\n"):
            data += self.socket.recv(4096)
        return json.loads(data)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.channel.close()
    bench.socket.close()


def test_commands_arrive_as_they_were_sent(bench: Bench):
    bench.tell(Run(windows=(1, 2), timeout_s=2.5))
    bench.tell(Verify("full"))
    assert bench.inbox.get(timeout=60) == Run(windows=(1, 2), timeout_s=2.5)
    assert bench.inbox.get(timeout=60) == Verify("full")


def test_a_line_that_is_no_command_goes_to_the_inbox_as_an_error(bench: Bench):
    bench.socket.sendall(b"what is this\n")
    bench.tell(Verify("full"))
    assert isinstance(bench.inbox.get(timeout=60), RemoteProtocolError)
    assert bench.inbox.get(timeout=60) == Verify("full")


def test_a_bench_that_hangs_up_is_noticed_while_nobody_reads(bench: Bench):
    bench.socket.close()
    assert bench.gone.wait(60)
    assert bench.inbox.get(timeout=60) is None


def test_a_bench_that_hangs_up_after_the_last_answer_is_right(bench: Bench):
    bench.channel.expect_end()
    bench.socket.close()
    assert bench.inbox.get(timeout=60) is None
    assert not bench.gone.is_set()


def test_a_bench_that_is_gone_is_no_error_of_those_who_answer(bench: Bench):
    bench.socket.close()
    for _ in range(3):
        bench.channel.send("answer", {})


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[1]", b'{"do": "dance", "args": {}}', b'{"do": "verify", "args": {"mode": 3}}', b'{"do": "run"}'],
)
def test_what_is_no_command_is_refused(line: bytes):
    with pytest.raises(RemoteProtocolError, match="not a command of a rank"):
        parse_command(line)


def test_rooms_survive_the_trip_with_all_64_bits():
    room = Room(index=0, number=2**64 - 1, tokens=1, prefix_tokens=0, decode_dp=0)
    line = orjson.dumps({"do": "prepare", "args": {"batch": 0, "path": "auto", "rooms": [room]}})
    assert parse_command(line).rooms == (room,)  # type: ignore[union-attr]


def test_lines_are_cut_wherever_the_stream_is():
    for size in (1, 2, 3, 100):
        lines = LineBuffer()
        stream = b"one\ntwo\n\nthree"
        got = [line for at in range(0, len(stream), size) for line in lines.feed(stream[at : at + size])]
        assert got == [b"one", b"two", b""]
        assert lines.feed(b"\n") == [b"three"]


def test_a_line_without_end_is_refused():
    lines = LineBuffer(limit_bytes=10)
    lines.feed(b"0123456789")
    with pytest.raises(LineTooLong, match="more than 10 bytes"):
        lines.feed(b"x")
