"""Queries to many agents: partial answers, timeouts, other protocols, and no leaked sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvctl.client import fanout as fanout_module
from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.fanout import Fanout, Reply
from kvctl.client.faults import Fault, FaultCode
from kvctl_agent.contract.admin import RELAY_SOCKET
from tests.support.names import Names
from tests.support.routers import Answer, answer_with, batched, refused, router

HELLO = Call("hello")
FAST_NS = 150_000_000
LONG_NS = 60_000_000_000


@contextmanager
def agent_at(path: Path, answer: Answer) -> Iterator[Endpoint]:
    """The endpoint of an agent that answers so."""
    with router(f"ipc://{path}", answer=answer):
        yield Endpoint(path.stem, path)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def ask(endpoint: Endpoint, *calls: Call, timeout_ns: int = LONG_NS) -> list[Reply]:
    with Fanout() as fanout:
        return fanout.ask([(endpoint, call) for call in calls], timeout_ns)


def test_a_silent_host_name_delays_nobody_and_is_named(names: Names, tmp_path: Path) -> None:
    """libzmq would look it up on the thread that serves all other agents on TCP."""
    names.silent.add("slow.test")
    names.known["agent.test"] = ["127.0.0.1"]
    hosts = ["slow.test", "127.0.0.1", "agent.test", "unknown.test"]
    begun = time.monotonic()
    with router("tcp://127.0.0.1:*", answer=lambda frames: answer_with(frames, 1)) as address, Fanout(None) as fanout:
        port = address.rpartition(":")[2]
        endpoints = [Endpoint(host, None, remote=f"tcp://{host}:{port}") for host in hosts]
        slow, *quick, unknown = fanout.ask([(endpoint, HELLO) for endpoint in endpoints], 1_000_000_000)
    assert time.monotonic() - begun < 30
    assert [reply.data for reply in quick] == [1, 1]
    assert all(reply.rtt_ns < 1_000_000_000 for reply in quick)
    assert slow.fault is not None
    assert slow.fault.message == "host slow.test: no answer from the resolver in /etc/resolv.conf within the time limit"
    assert unknown.fault is not None
    assert unknown.fault.message.startswith("host unknown.test cannot be looked up: ")


def test_thousands_of_connection_errors_that_nobody_has_read_keep_nobody_from_leaving() -> None:
    fanout = Fanout(None)
    for number in range(1, 201):
        fanout._route(Endpoint(f"a{number}", None, remote=f"tcp://127.0.4.{number}:1"))  # nobody listens there
    fanout._sockets[True].reconnect_ivl = 1
    time.sleep(2)
    ended = threading.Thread(target=fanout.__exit__, args=(None, None, None), daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()


def test_many_silent_agents_are_all_asked_within_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of agents that do not answer, a window was asked every 250 ms."""
    monkeypatch.setattr(fanout_module, "_WINDOW", 4)
    with socket.socket() as listener:  # the kernel accepts connections, and nobody answers
        listener.bind(("0.0.0.0", 0))
        listener.listen(100)
        port = listener.getsockname()[1]
        endpoints = [Endpoint(f"a{number}", None, remote=f"tcp://127.0.1.{number}:{port}") for number in range(1, 61)]
        begun = time.monotonic()
        with Fanout(None) as fanout:
            replies = fanout.ask([(endpoint, HELLO) for endpoint in endpoints], 500_000_000)
        took_s = time.monotonic() - begun
    assert {reply.fault.code for reply in replies if reply.fault} == {FaultCode.TIMEOUT}
    assert sum("was not asked" in reply.fault.message for reply in replies if reply.fault) == 0
    assert took_s < 60 / 4 * 0.25  # the time with a fixed pace


def test_silence_is_a_timeout_and_costs_the_deadline_only(socket_directory: Path, at_best: Any) -> None:
    reply: Any = None
    with agent_at(socket_directory / "mute.sock", lambda frames: None) as endpoint:

        def took() -> float:
            nonlocal reply
            started = time.monotonic()
            (reply,) = ask(endpoint, HELLO, timeout_ns=600_000_000)
            return time.monotonic() - started

        at_best(took, 0.8)  # all of them end after 0.9 s
    assert reply.fault is not None
    assert reply.fault.code == "timeout"
    assert "0.6 s" in reply.fault.message


def test_an_agent_that_ended_before_it_answered_does_not_hang(socket_directory: Path) -> None:
    path = socket_directory / "decode-0.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    ended = threading.Timer(0.1, listener.close)
    ended.start()
    with Fanout() as fanout:
        (reply,) = fanout.ask([(Endpoint("decode-0", path), Call("hello"))], LONG_NS)
    ended.join(60)
    assert reply.rtt_ns < LONG_NS
    assert reply.fault == Fault("decode-0", FaultCode.UNREACHABLE, "its process ended before it answered")


def test_other_protocols_are_named(socket_directory: Path) -> None:
    cases: dict[str, Any] = {
        "magic": lambda frames: [b"KVA9", frames[1], frames[2]],
        "frames": lambda frames: [b"KVA1", frames[1]],
        "text": lambda frames: [b"KVA1", frames[1], b"{nonsense"],
        "shape": lambda frames: [b"KVA1", frames[1], b'{"ok": true}'],
    }
    for name, answer in cases.items():
        with agent_at(socket_directory / f"{name}.sock", answer) as endpoint:
            (reply,) = ask(endpoint, HELLO)
        assert reply.fault is not None, name
        assert (reply.fault.agent, reply.fault.code) == (name, "protocol")


def test_a_late_reply_is_not_taken_for_a_later_one(socket_directory: Path) -> None:
    held: list[list[bytes]] = []

    def late_once(frames: list[bytes]) -> list[bytes] | None:
        if not held:
            held.append(frames)
            return None
        first, held[:] = held[0], [[]]
        # The old request's answer comes before the new one's would; the new one is never answered.
        return answer_with(first, "old")

    with agent_at(socket_directory / "late.sock", late_once) as endpoint, Fanout() as fanout:
        assert fanout.ask([(endpoint, HELLO)], FAST_NS)[0].fault is not None
        (second,) = fanout.ask([(endpoint, HELLO)], FAST_NS)
    assert second.data is None
    assert second.fault is not None


def test_an_agent_cannot_answer_for_another(socket_directory: Path) -> None:
    lied = threading.Event()

    def lie(frames: list[bytes]) -> list[bytes]:
        lied.set()
        return answer_with([frames[0], b"%d" % (int(frames[1]) + 2), frames[2]], "a lie")  # routes have numbers, too

    def tell(frames: list[bytes]) -> list[bytes]:
        lied.wait(60)
        time.sleep(0.1)
        return answer_with(frames, "the truth")

    liar, honest = (agent_at(socket_directory / f"{name}.sock", answer) for name, answer in (("a", lie), ("b", tell)))
    with liar as first, honest as second, Fanout() as fanout:
        replies = fanout.ask([(first, HELLO), (second, HELLO)], 3_000_000_000)
    assert [reply.data for reply in replies] == [None, "the truth"]


def test_an_address_has_one_connection_whatever_it_is_called(start: Any, socket_directory: Path) -> None:
    start("decode-0")
    path = socket_directory / "decode-0.sock"
    names = [Endpoint(name, path) for name in ("pod", "pod (terminating)", "pod")]
    with Fanout() as fanout:
        for endpoint in names:
            (reply,) = fanout.ask([(endpoint, HELLO)], LONG_NS)
            assert reply.fault is None, reply.fault
            assert list(fanout._routes) == [endpoint]
        for endpoint in names:
            fanout.forget(endpoint)


class TestObserver:
    """Agents that are asked over the connection of their observer."""

    @staticmethod
    def observer(names: list[str], asked: list[bytes]) -> Any:
        def answer(frames: list[bytes]) -> list[bytes]:
            name = frames[3]
            asked.append(name)
            if not name:
                return answer_with(frames, names)
            if name == b"ended":
                return refused(frames, "unknown-agent", "no such agent")
            return answer_with(frames, name.decode())

        return answer

    def test_all_of_them_take_one_connection(self, socket_directory: Path) -> None:
        names, asked = [f"a{number}" for number in range(300)], list[bytes]()
        endpoints = [Endpoint(name, socket_directory / f"{name}.sock") for name in names]
        for endpoint in endpoints:
            assert endpoint.path is not None
            endpoint.path.touch()
        with agent_at(socket_directory / RELAY_SOCKET, batched(self.observer(names, asked))), Fanout() as fanout:
            assert fanout.use_observer(socket_directory, LONG_NS) == set(names)
            replies = fanout.ask([(endpoint, call) for endpoint in endpoints for call in (HELLO, HELLO)], LONG_NS)
            assert [reply.data for reply in replies] == [name for name in names for _ in range(2)]
            assert len(fanout._routes) == 1
        assert asked == [b"", *(name.encode() for name in names for _ in range(2))]

    def test_one_that_it_serves_no_more_is_asked_itself(self, socket_directory: Path) -> None:
        asked: list[bytes] = []
        relay = agent_at(socket_directory / RELAY_SOCKET, batched(self.observer(["ended", "other"], asked)))
        with (
            relay,
            agent_at(socket_directory / "ended.sock", lambda frames: answer_with(frames, "itself")) as ended,
            Fanout() as fanout,
        ):
            fanout.use_observer(socket_directory, LONG_NS)
            other = Endpoint("other", socket_directory / "other.sock")
            for _ in range(2):
                replies = fanout.ask([(ended, HELLO), (other, HELLO), (ended, HELLO)], LONG_NS)
                assert [reply.data for reply in replies] == ["itself", "other", "itself"]
        assert asked == [b"", b"ended", b"ended", b"other", b"other"]

    def test_what_it_has_taken_before_is_not_asked_twice(self, socket_directory: Path) -> None:
        """An action would be carried out twice."""

        def relay(frames: list[bytes]) -> list[bytes]:
            if not frames[3]:
                return answer_with(frames, ["a0"])
            if orjson.loads(frames[2])["cmd"] == "drain":
                return answer_with(frames, "drained")
            return refused(frames, "unknown-agent", "no a0")

        def itself(frames: list[bytes]) -> list[bytes]:
            asked.append(orjson.loads(frames[2])["cmd"])
            return answer_with(frames, "itself")

        asked: list[str] = []
        observer, agent = (
            agent_at(socket_directory / RELAY_SOCKET, batched(relay)),
            agent_at(socket_directory / "a0.sock", itself),
        )
        with observer, agent as endpoint, Fanout() as fanout:
            fanout.use_observer(socket_directory, LONG_NS)
            replies = fanout.ask([(endpoint, HELLO), (endpoint, Call("drain"))], LONG_NS)
        assert [reply.data for reply in replies] == ["itself", "drained"]
        assert asked == ["hello"]

    def test_many_that_it_serves_no_more_take_no_more_connections_than_are_allowed(
        self, socket_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        most, wanted = 0, list[int]()
        put = Fanout._put

        def allowed(_: Fanout, endpoints: Set[Endpoint]) -> int:
            wanted.append(len(endpoints))
            return 3

        def counting(self: Fanout, *args: Any) -> bool:
            nonlocal most
            sent = put(self, *args)
            most = max(most, len(self._routes))
            return sent

        def relay(frames: list[bytes]) -> list[bytes]:
            if not frames[3]:
                names = [f"agent-{number}" for number in range(8)]
                return answer_with(frames, names)
            return refused(frames, "unknown-agent", "")

        monkeypatch.setattr(Fanout, "_connections_allowed", allowed)
        monkeypatch.setattr(Fanout, "_put", counting)
        agents = mixed_agents(socket_directory, answering=8, silent=0)
        with agent_at(socket_directory / RELAY_SOCKET, batched(relay)), agents as endpoints, Fanout() as fanout:
            fanout.use_observer(socket_directory, LONG_NS)
            replies = fanout.ask([(endpoint, HELLO) for endpoint in endpoints], LONG_NS)
        assert [reply.data for reply in replies] == [{}] * 8
        assert (most, wanted) == (3, [1, 9])

    def test_one_that_does_not_answer_is_asked_again_after_growing_pauses(
        self, socket_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def silent(frames: list[bytes]) -> None:
            asked.append(frames[1])

        asked: list[bytes] = []
        with agent_at(socket_directory / RELAY_SOCKET, silent), Fanout() as fanout:
            pauses_ns = []
            for shortest_ns in (1, 1, 1, 1, LONG_NS, LONG_NS):
                monkeypatch.setattr(fanout_module, "SHORTEST_PAUSE_NS", shortest_ns)
                monkeypatch.setattr(fanout_module, "LONGEST_PAUSE_NS", 4 * shortest_ns)
                assert fanout.use_observer(socket_directory, FAST_NS // 10) == frozenset()
                pauses_ns.append(fanout._pauses[socket_directory][1])
        assert pauses_ns == [1, 2, 4, 4, LONG_NS, LONG_NS]
        assert len(asked) <= 5

    def test_one_whose_socket_is_gone_is_at_fault_before_the_time_limit(self, socket_directory: Path) -> None:
        def silent(frames: list[bytes]) -> list[bytes] | None:
            return None if frames[3] else answer_with(frames, ["a0"])

        with agent_at(socket_directory / RELAY_SOCKET, silent), Fanout() as fanout:
            fanout.use_observer(socket_directory, LONG_NS)
            (reply,) = fanout.ask([(Endpoint("a0", socket_directory / "a0.sock"), HELLO)], LONG_NS)
        assert reply.fault == Fault("a0", FaultCode.UNREACHABLE, "its process ended before it answered")


@contextmanager
def mixed_agents(directory: Path, answering: int, silent: int) -> Iterator[list[Endpoint]]:
    """Endpoints of silent agents, followed by those of agents that answer."""

    with ExitStack() as stack:
        names: list[tuple[str, Any]] = [*((f"silent-{number}", lambda frames: None) for number in range(silent))]
        names += [(f"agent-{number}", lambda frames: answer_with(frames, {})) for number in range(answering)]
        yield [stack.enter_context(agent_at(directory / f"{name}.sock", answer)) for name, answer in names]


def test_silent_agents_leave_the_window_and_delay_nobody(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for two in the window, five silent agents ask for one time limit together, not one after another."""
    monkeypatch.setattr(fanout_module, "_WINDOW", 2)
    monkeypatch.setattr(fanout_module, "_EXPECTED_NS", 1_000_000)
    with mixed_agents(socket_directory, answering=4, silent=5) as endpoints, Fanout() as fanout:
        replies = fanout.ask([(endpoint, HELLO) for endpoint in endpoints], 2_000_000_000)
    assert [reply.fault and reply.fault.code for reply in replies] == ["timeout"] * 5 + [None] * 4
    first = min(reply.rtt_ns for reply in replies[:5])
    assert all(reply.received_at_ns - replies[0].sent_at_ns < first for reply in replies[5:])


def test_a_silent_agent_is_reported_also_without_a_free_descriptor(socket_directory: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []

    def take_all(frames: list[bytes]) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 16, before[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))

    with agent_at(socket_directory / "mute.sock", take_all) as endpoint, Fanout() as fanout:
        try:
            (reply,) = fanout.ask([(endpoint, HELLO)], 500_000_000)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for descriptor in taken:
                os.close(descriptor)
    assert reply.fault is not None
    assert reply.fault.code is FaultCode.TIMEOUT
    assert reply.fault.message.startswith("was not reached: 1 more file descriptors are needed and 0 are free")


def test_agents_beyond_the_limit_of_connections_do_not_prolong_the_call(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch, at_best: Any
) -> None:
    monkeypatch.setattr(Fanout, "_connections_allowed", lambda *_: 1)
    with mixed_agents(socket_directory, answering=0, silent=12) as endpoints, Fanout() as fanout:

        def took() -> float:
            started = time.monotonic()
            replies = fanout.ask([(endpoint, HELLO) for endpoint in endpoints], FAST_NS)
            assert all(reply.fault is not None for reply in replies)
            return time.monotonic() - started

        at_best(took, 3 * FAST_NS / 1e9)


def test_connections_beyond_the_limit_are_opened_when_others_are_done(
    socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fanout, "_connections_allowed", lambda *_: 3)
    most = 0
    send = Fanout._send

    def counting(self: Fanout, *args: Any) -> None:
        nonlocal most
        send(self, *args)
        most = max(most, len(self._routes))

    monkeypatch.setattr(Fanout, "_send", counting)
    with mixed_agents(socket_directory, answering=8, silent=2) as endpoints, Fanout() as fanout:
        for _ in range(2):
            replies = fanout.ask([(endpoint, HELLO) for endpoint in endpoints], 2_000_000_000)
            assert [reply.fault is None for reply in replies] == [False] * 2 + [True] * 8
    assert most == 3
