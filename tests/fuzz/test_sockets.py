"""Live sockets under fire: whatever frames and bytes come, they go on serving, and hold nothing of who sent them."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl_agent.agent import Agent
from kvctl_agent.contract.admin import MAGIC, MAX_REQUEST_BYTES
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.observer.server import SERVED_HERE
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import messages as msg
from kvctl_agent.rank import Rank
from kvctl_agent.transport.mooncake import tags
from tests.fuzz.seeds import SEEDS
from tests.support.admin_server import AdminServer
from tests.support.polling import until

Context = zmq.Context[zmq.Socket[bytes]]
PATIENCE_S = 60
SHAPE = ModelShape(2, 2, 8, 8, 2)
MANY = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

control = st.sampled_from(SEEDS["control"])
frame = (
    st.binary(max_size=64)
    | st.sampled_from([MAGIC, b"", b"\0", *SEEDS["admin"], *SEEDS["registry"], *SEEDS["control"]])
    | st.builds(
        lambda size, fill: bytes([fill]) * size, st.sampled_from([65, MAX_REQUEST_BYTES + 1]), st.integers(0, 255)
    )
)


@contextlib.contextmanager
def dealer(context: Context, address: str, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    made.setsockopt(zmq.SNDTIMEO, 1000 * PATIENCE_S)
    if identity:
        made.setsockopt(zmq.IDENTITY, identity)
    made.connect(address)
    try:
        yield made
    finally:
        made.close()


class TestAdmin:
    @pytest.fixture
    def server(self, socket_dir: Path) -> Iterator[AdminServer]:
        handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            command.name: lambda args: args for command in COMMANDS if command.name not in SERVED_HERE
        }
        hello: Any = {"name": "target", "level": ""}
        with AdminServer("target", handlers, lambda: hello, socket_dir) as server:
            yield server

    @MANY
    @given(requests=st.lists(st.lists(frame, min_size=1, max_size=6), max_size=6))
    def test_any_frames(self, zmq_context: Context, server: AdminServer, requests: list[list[bytes]]) -> None:
        with dealer(zmq_context, f"ipc://{server.path}") as client:
            for frames in requests:
                client.send_multipart(frames)
            client.send_multipart([MAGIC, b"last", b'{"cmd": "hello"}'])
            for _ in range(len(requests) + 1):
                assert client.poll(1000 * PATIENCE_S)
                magic, request, body = client.recv_multipart()
                answer = orjson.loads(body)
                assert magic == MAGIC
                assert answer["ok"] or answer["error"]["code"] != "internal"
            assert request == b"last"
            assert answer["data"]["name"] == "target"

    def test_bytes_that_are_no_zmq_and_clients_that_go_away(self, zmq_context: Context, server: AdminServer) -> None:
        dice = random.Random(4)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
        ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\6DEALER"
        endless = b"\x03" + (1 << 20).to_bytes(8, "big")  # a large frame, and more to follow
        huge = b"\x02" + (1 << 62).to_bytes(8, "big")
        with contextlib.ExitStack() as open_ones:
            for number in range(60):
                stranger = open_ones.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(str(server.path))
                with contextlib.suppress(OSError):  # it may hang up on us while we speak
                    stranger.sendall(
                        (dice.randbytes(200), greeting, greeting + ready + endless, greeting + ready + huge)[number % 4]
                    )
                if number % 3:
                    stranger.close()
            self.test_any_frames.hypothesis.inner_test(self, zmq_context, server, [])  # type: ignore[attr-defined]

    def test_clients_that_come_and_go_leave_nothing(self, zmq_context: Context, server: AdminServer) -> None:
        for number in range(200):
            with dealer(zmq_context, f"ipc://{server.path}", b"client %d" % number) as client:
                client.send_multipart([MAGIC, b"1", b"{"])
        self.test_any_frames.hypothesis.inner_test(self, zmq_context, server, [])  # type: ignore[attr-defined]


class TestAgent:
    """A prefill and a decode rank over ipc, without keys: whoever shares our uid may connect."""

    @pytest.fixture
    def pair(self, socket_dir: Path) -> Iterator[tuple[Agent, Agent]]:
        pools = [
            KVPool.allocate(local_shards(SHAPE, 4, ParallelConfig(), RankCoord(0, 0, 0, 0)), 4, 16) for _ in range(2)
        ]
        agents = [
            Agent(
                role=role,  # type: ignore[arg-type]
                rank=Rank(),
                pool=pool,
                name=f"{role}-0",
                bootstrap=f"ipc://{socket_dir}/f/boot",
                model=SHAPE,
                transport="loopback",
                path="bulk",
                staging_buffer_mb=1,
                staging_ring_mb=1,
                resend_s=0.1,
                heartbeat_s=0.2,
                suspect_s=0.6,
                lost_s=1.2,
            )
            for role, pool in zip(("prefill", "decode"), pools, strict=True)
        ]
        with contextlib.ExitStack() as stack:
            for pool in pools:
                stack.callback(pool.close)
            for agent in agents:
                stack.callback(agent.close)
                agent.start()
            for agent in agents:
                agent.wait_ready(PATIENCE_S)
            yield agents[0], agents[1]

    @MANY
    @given(
        frames=st.lists(control | st.binary(max_size=64), min_size=1, max_size=8),
        name=st.sampled_from([b"prefill-0", b"decode-1", b"\xff\xfe", b"x" * 255, b"decode-0\0" + bytes(16)]),
        cut=st.integers(0, 40),
    )
    def test_control_and_registry_hear_anything_and_rooms_still_move(
        self, zmq_context: Context, pair: tuple[Agent, Agent], frames: list[bytes], name: bytes, cut: int
    ) -> None:
        prefill, decode = pair
        for address in (decode.parts.control_channel.endpoint("prefill-0"), prefill.parts.lifecycle.instances[0]):
            with dealer(zmq_context, address, name) as stranger:
                for number, each in enumerate(frames):
                    stranger.send_multipart([each[: len(each) - cut] if number % 2 else each] * (1 + number % 3))
                stranger.send_multipart([b""] * 1000)
        move(prefill, decode)
        assert len(prefill.parts.machine.peers) <= 8  # one for each name above, and none for each connection
        bugs = [row["text"] for agent in pair for row in agent.observe.events()["events"] if row["kind"] == "control"]
        assert bugs == []

    @pytest.mark.parametrize("identity", [b"decode-0", b"decode-0\0" + bytes(16)], ids=["name", "name and a guess"])
    def test_who_takes_a_peers_name_hears_nothing_of_it_and_costs_no_room(
        self, zmq_context: Context, pair: tuple[Agent, Agent], identity: bytes
    ) -> None:
        prefill, decode = pair
        with dealer(zmq_context, decode.parts.control_channel.endpoint("prefill-0"), identity) as thief:
            before = prefill.telemetry.metrics.total("kvctl_control_dropped_total")
            for each in SEEDS["control"]:
                thief.send(each)
            thief.send(codec.encode(decode.incarnation, [msg.Bye(True)]))
            until(
                lambda: (
                    prefill.telemetry.metrics.total("kvctl_control_dropped_total") >= before + len(SEEDS["control"])
                ),
                "what the thief said has not come",
                PATIENCE_S,
            )
            move(prefill, decode, tries=1)
            while thief.poll(50):  # it is told at most that the name is in use
                assert all(isinstance(m, msg.HelloAck) and m.taken for m in codec.decode(thief.recv())[1])


_rooms = itertools.count(1000)


def move(prefill: Agent, decode: Agent, tries: int = 100) -> None:
    """One room, to its end; again under another number where a stranger has aborted it."""
    deadline = time.monotonic() + PATIENCE_S
    for left in reversed(range(tries)):
        room = next(_rooms)
        receive, send = decode.receive(room, np.arange(4)), prefill.send(room)
        send.pages(np.arange(4), last=True)
        send.finish()
        if {handle.wait(PATIENCE_S) for handle in (receive, send)} == {RoomState.SUCCESS}:
            return
        assert left, (receive.error, send.error)
        assert time.monotonic() < deadline, (receive.error, send.error)


class TestTagPort:
    """The TCP port that Mooncake's tags arrive on: reachable by others, and open to who knows the secret."""

    @pytest.fixture
    def listener(self) -> Iterator[tags.TagListener]:
        made = tags.TagListener("127.0.0.1")
        yield made
        made.close()

    def hears(self, listener: tags.TagListener) -> None:
        """A writer with the secret gets through, whoever else is there."""
        hello = tags.greeting(listener.secret, "i" * tags.IDENT_BYTES, "writer")
        link = tags.TagLink("peer", ("127.0.0.1", listener.port), hello)
        link.enqueue(b"t" * 46)
        landed: deque[tuple[tags.Sender, bytes]] = deque()
        deadline = time.monotonic() + PATIENCE_S
        while not landed:
            assert time.monotonic() < deadline
            listener.collect(landed)
            link.flush()
        assert [(sender.name, tag) for sender, tag in landed] == [("writer", b"t" * 46)]
        link.close()

    @MANY
    @given(streams=st.lists(st.binary(max_size=2000), min_size=1, max_size=5), knows=st.booleans())
    def test_any_bytes(self, listener: tags.TagListener, streams: list[bytes], knows: bool) -> None:
        landed: deque[tuple[tags.Sender, bytes]] = deque()
        for stream in streams:
            with socket.create_connection(("127.0.0.1", listener.port)) as stranger, contextlib.suppress(OSError):
                if knows:
                    stranger.sendall(tags.greeting(listener.secret, "j" * tags.IDENT_BYTES, "n"))
                stranger.sendall(stream)
            listener.collect(landed)
        assert knows or not landed
        self.hears(listener)

    def test_half_open_connections_and_slow_ones_are_few_and_shut_nobody_out(self, listener: tags.TagListener) -> None:
        landed: deque[tuple[tags.Sender, bytes]] = deque()
        with contextlib.ExitStack() as open_ones:
            slow = []
            for number in range(300):
                stranger = open_ones.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
                if number % 2:
                    stranger.sendall(b"k")
                    slow.append(stranger)
                if number % 100 == 99:
                    listener.collect(landed)
            for at in range(1, 8):
                for stranger in slow:
                    with contextlib.suppress(OSError):  # dropped for a newer one
                        stranger.sendall(b"kvctltag"[at : at + 1])
                listener.collect(landed)
            assert len(listener._senders) <= 65
            self.hears(listener)
        assert not landed

    def test_a_writer_that_claims_more_than_a_tag_is_hung_up_on(self, listener: tags.TagListener) -> None:
        landed: deque[tuple[tags.Sender, bytes]] = deque()
        hello = tags.greeting(listener.secret, "i" * tags.IDENT_BYTES, "writer")
        with socket.create_connection(("127.0.0.1", listener.port), timeout=PATIENCE_S) as writer:
            writer.sendall(hello + (1 << 31).to_bytes(4, "little"))
            writer.setblocking(False)
            deadline = time.monotonic() + PATIENCE_S
            hung_up = False
            while not hung_up:
                assert time.monotonic() < deadline
                listener.collect(landed)
                with contextlib.suppress(BlockingIOError):
                    hung_up = writer.recv(1) == b""
        assert not landed
