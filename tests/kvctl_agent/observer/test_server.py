"""The admin server over real sockets: what it answers, and what no client can do to it."""

from __future__ import annotations

import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from kvctl_agent.contract.admin import MAGIC, MAX_REQUEST_BYTES, ErrorCode
from kvctl_agent.contract.commands import COMMANDS, Command, Level
from kvctl_agent.errors import AdminError, DeadlineExceeded, RequestRefused
from kvctl_agent.observer import server as server_module
from kvctl_agent.observer.endpoints import SEND_TIMEOUT_MS, ClientRequest, UnixEndpoint
from kvctl_agent.observer.flight_recorder import RecordedEvents
from kvctl_agent.observer.metrics import Metrics
from kvctl_agent.observer.requests import Request
from kvctl_agent.observer.server import SERVED_HERE, AdminService, ServerLoop
from kvctl_agent.observer.socket_claim import prepare_directory
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from tests.support.admin_client import handlers, hello
from tests.support.admin_server import AdminServer
from tests.support.polling import until

Serve = Callable[..., AdminServer]
Connect = Callable[..., Any]  # a Client of tests.support.admin_client


class TestAnswers:
    def test_a_handler_gets_checked_arguments_and_its_answer_arrives(self, serve: Serve, connect: Connect) -> None:
        client = connect(serve())
        answer = client.ask("room", room=str(2**64 - 1))
        assert answer["ok"] is True
        assert answer["data"] == {"command": "room", "args": {"room": 2**64 - 1}}

    def test_snapshots_carry_their_moment_and_a_growing_sequence(self, serve: Serve, connect: Connect) -> None:
        server = serve()
        one, two = connect(server), connect(server)
        before = time.time_ns()
        answers = [one.ask("status"), two.ask("status"), one.ask("nothing"), two.ask("status")]
        after = time.time_ns()
        assert [answer["sequence"] for answer in answers] == [1, 2, 3, 4]
        slack = 1_000_000_000  # between two clocks that are not read at one moment
        assert all(before - slack <= answer["generated_at_ns"] <= after + slack for answer in answers)

    def test_hello_tells_who_and_the_level_of_an_ipc_client(self, serve: Serve, connect: Connect) -> None:
        data = connect(serve("prefill-3")).ask("hello")["data"]
        assert (data["name"], data["pid"], data["level"]) == ("prefill-3", os.getpid(), "admin")

    def test_commands_lists_exactly_the_declared_ones(self, serve: Serve, connect: Connect) -> None:
        rows = connect(serve()).ask("commands")["data"]
        assert [row["name"] for row in rows] == [command.name for command in COMMANDS]
        (rooms,) = (row for row in rows if row["name"] == "rooms")
        assert [arg["name"] for arg in rooms["args"]] == ["state", "limit"]
        assert "Transferring" in rooms["args"][0]["choices"]

    def test_stacks_shows_where_threads_are(self, serve: Serve, connect: Connect) -> None:
        release = threading.Event()

        def wait_here() -> None:
            release.wait(60)

        thread = threading.Thread(target=wait_here, name="stuck-worker")
        thread.start()
        try:
            rows = connect(serve()).ask("stacks")["data"]
        finally:
            release.set()
            thread.join()
        by_name = {row["name"]: row["frames"] for row in rows}
        assert any("wait_here" in frame for frame in by_name["stuck-worker"])
        assert "kvctl-admin-decode-0" in by_name


class TestRefusals:
    @pytest.mark.parametrize(
        ("frames", "request_id", "code"),
        [
            ((b"KVA9", b"7", b"{}"), b"7", ErrorCode.PROTOCOL),
            ((b"",), b"", ErrorCode.PROTOCOL),
            ((MAGIC, b"7"), b"7", ErrorCode.BAD_REQUEST),
            ((MAGIC, b"7", b"{}", b"", b"", b"", b""), b"7", ErrorCode.BAD_REQUEST),
            ((MAGIC, b"7", b"nonsense"), b"7", ErrorCode.BAD_REQUEST),
            ((MAGIC, b"7", b'{"cmd":"rooom"}'), b"7", ErrorCode.UNKNOWN_COMMAND),
            ((MAGIC, b"7", b'{"cmd":"room"}'), b"7", ErrorCode.BAD_ARGUMENT),
            ((MAGIC, b"7", b" " * (MAX_REQUEST_BYTES + 1)), b"7", ErrorCode.TOO_LARGE),
        ],
    )
    def test_each_mistake_has_its_code_under_the_clients_id(
        self, serve: Serve, connect: Connect, frames: tuple[bytes, ...], request_id: bytes, code: ErrorCode
    ) -> None:
        client = connect(serve())
        client.send(*frames)
        magic, answered, reply = client.receive()
        assert (magic, answered) == (MAGIC, request_id)
        assert (reply["ok"], reply["error"]["code"]) == (False, code)
        assert client.ask("status")["ok"]

    def test_a_handler_may_refuse(self, serve: Serve, connect: Connect) -> None:
        def room(args: dict[str, Any]) -> None:
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"no room {args['room']}")

        reply = connect(serve(own={"room": room})).ask("room", room="7")
        assert reply["error"] == {"code": "unknown-room", "message": "no room 7"}

    def test_a_client_below_the_commands_level_is_not_permitted(
        self, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drain = Command("drain", "", Level.OPERATE)
        monkeypatch.setattr(server_module, "parse_body", lambda *_: Request(drain, {}))
        receive = UnixEndpoint.receive

        def as_reader(endpoint: UnixEndpoint) -> list[ClientRequest]:
            return [request._replace(level=Level.READ) for request in receive(endpoint)]

        monkeypatch.setattr(UnixEndpoint, "receive", as_reader)
        error = connect(serve()).ask("drain")["error"]
        assert error == {"code": "not-permitted", "message": "drain needs level operate, this client has read"}

    def test_an_answer_that_is_too_large_says_how_to_ask_for_less(
        self, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_module, "MAX_REPLY_BYTES", 1000)
        reply = connect(serve(own={"events": lambda _: "x" * 1001})).ask("events")
        assert reply["error"]["code"] == "too-large"
        assert "limit" in reply["error"]["message"]

    def test_handlers_must_be_the_declared_commands(self) -> None:
        some = {command.name: lambda _: 1 for command in COMMANDS if command.name not in SERVED_HERE | {"rooms"}}
        with pytest.raises(AdminError, match=r"missing \['rooms'\], undeclared \['roms'\]"):
            AdminServer("a", {**some, "roms": lambda _: 1}, lambda: pytest.fail("not asked"))


class TestFailingHandlers:
    def test_the_client_gets_the_text_and_the_agent_keeps_it(self, serve: Serve, connect: Connect) -> None:
        metrics = Metrics()
        recorder = RecordedEvents(Clock(), "decode-0", 16)

        def broken(_: dict[str, Any]) -> None:
            raise ZeroDivisionError("ring of size 0")

        client = connect(serve(own={"staging": broken}, metrics=metrics, recorder=recorder))
        for _ in range(3):
            reply = client.ask("staging")
            assert reply["error"] == {
                "code": "internal",
                "message": "staging failed inside the agent: ZeroDivisionError: ring of size 0",
            }
        assert client.ask("status")["ok"]
        events = recorder.since(0, 10)["events"]
        assert [(event["kind"], event["severity"]) for event in events] == [("admin", "error")] * 3
        assert "ring of size 0" in events[0]["text"]
        assert metrics.total("kvctl_admin_requests_total", "staging") == 3
        assert metrics.total("kvctl_admin_requests_total", "status") == 1
        assert metrics.total("kvctl_admin_errors_total", "internal") == 3

    @pytest.mark.parametrize("data", [object(), {1: 2}, 2**64, {"a": {"b": {3}}}], ids=["object", "key", "big", "set"])
    def test_data_that_is_no_json(self, serve: Serve, connect: Connect, data: object) -> None:
        client = connect(serve(own={"peers": lambda _: data}))
        assert client.ask("peers")["error"]["code"] == "internal"
        assert client.ask("status")["ok"]

    def test_text_that_is_no_unicode_is_escaped(self, serve: Serve, connect: Connect) -> None:
        """One such name, setting or entry of the flight recorder would cost the whole answer."""
        data = [{"peer": "\ud800", "a\udcff": ["\ud800", 1, None]}]
        answer = connect(serve(own={"peers": lambda _: data})).ask("peers")
        assert answer["data"] == [{"peer": "\\ud800", "a\\udcff": ["\\ud800", 1, None]}]

    def test_an_error_text_that_is_no_unicode(self, serve: Serve, connect: Connect) -> None:
        def broken(_: dict[str, Any]) -> None:
            raise FileNotFoundError(2, "gone", os.fsdecode(b"/tmp/\xff"))

        reply = connect(serve(own={"peers": broken})).ask("peers")
        assert reply["error"]["code"] == "internal"
        assert "gone" in reply["error"]["message"]

    def test_endless_recursion(self, serve: Serve, connect: Connect) -> None:
        def deep(args: dict[str, Any]) -> Any:
            return deep(args)

        client = connect(serve(own={"peers": deep}))
        assert "RecursionError" in client.ask("peers")["error"]["message"]
        assert client.ask("status")["ok"]


class TestViolence:
    def test_ten_thousand_malformed_requests(self, serve: Serve, connect: Connect) -> None:
        metrics = Metrics()
        client = connect(serve(metrics=metrics))
        rng = random.Random(7)
        shapes: list[Callable[[], list[bytes]]] = [
            lambda: [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 6))],
            lambda: [MAGIC, rng.randbytes(8), rng.randbytes(rng.randrange(200))],
            lambda: [MAGIC, b"i", orjson.dumps({"cmd": rng.choice(["room", "rooms", "x"]), "args": {"room": 1}})],
            lambda: [MAGIC, rng.randbytes(rng.randrange(100))],
        ]
        for _ in range(20):
            for _ in range(500):
                client.send(*rng.choice(shapes)())
            for _ in range(500):
                assert client.receive()[2]["ok"] is False
        assert metrics.total("kvctl_admin_errors_total") == 10_000
        assert client.ask("status")["ok"]

    def test_bytes_that_are_no_zmq_at_all(self, serve: Serve, connect: Connect) -> None:
        server = serve()
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 10, b""):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(os.fspath(server.path or ""))
                raw.sendall(junk)
        assert connect(server).ask("status")["ok"]

    def test_a_frame_far_over_the_limit_costs_only_its_sender(self, serve: Serve, connect: Connect) -> None:
        server = serve()
        bully, other = connect(server), connect(server)
        bully.send(MAGIC, b"1", bytes(8 * MAX_REQUEST_BYTES))
        assert other.ask("status")["ok"]
        bully.socket.setsockopt(zmq.RCVTIMEO, 200)
        with pytest.raises(zmq.Again):
            bully.receive()

    def test_a_client_that_never_reads_loses_replies_and_delays_the_others_once(
        self, serve: Serve, connect: Connect
    ) -> None:
        recorder = RecordedEvents(Clock(), "decode-0", 16)
        server = serve(own={"events": lambda _: "x" * 500_000}, recorder=recorder)
        deaf, other = connect(server, receive_queue=1), connect(server)
        for number in range(400):
            deaf.send(MAGIC, str(number).encode(), b'{"cmd":"events"}')
        until(lambda: recorder.since(0, 10)["events"], "the deaf client is not noticed")
        taken: list[float] = []
        for _ in range(21):
            begin = time.monotonic()
            assert other.ask("status")["ok"]
            taken.append(time.monotonic() - begin)
        assert statistics.median(taken) < SEND_TIMEOUT_MS / 1000
        texts = [event["text"] for event in recorder.since(0, 10)["events"]]
        assert texts == ["a client does not read its replies: dropping them"]

    def test_clients_that_vanish_with_requests_under_way(self, serve: Serve, connect: Connect) -> None:
        server = serve()
        for _ in range(30):
            client = connect(server)
            client.send(MAGIC, b"1", b'{"cmd":"status"}')
            client.close()
        assert connect(server).ask("status")["ok"]


class TestThread:
    def test_idle_costs_no_cpu(self, serve: Serve, connect: Connect, at_best: Any) -> None:
        server = serve()
        assert connect(server).ask("status")["ok"]

        def cpu_s() -> float:
            before = time.process_time()
            time.sleep(1.0)
            return time.process_time() - before

        at_best(cpu_s, 0.01)  # the ZMQ threads of this process's clients included

    def test_close_wakes_an_idle_server_at_once(self, serve: Serve) -> None:
        server = serve()
        path = server.path
        assert path is not None
        server.close()  # raises when its thread has not ended in time
        assert not path.exists()
        assert list(path.parent.iterdir()) == []
        assert server.path is None
        server.close()

    def test_close_keeps_its_deadline_when_a_handler_hangs(self, serve: Serve, connect: Connect) -> None:
        entered, release = threading.Event(), threading.Event()

        def hang(_: dict[str, Any]) -> None:
            entered.set()
            release.wait(60)

        server = serve(own={"layers": hang})
        path = server.path
        assert path is not None
        connect(server).send(MAGIC, b"1", b'{"cmd":"layers"}')
        assert entered.wait(60)
        try:
            with pytest.raises(DeadlineExceeded, match="did not stop within"):
                server.close(timeout=0.1)
            # Its socket will be removed when the handler ends: nobody else may bind there before.
            with pytest.raises(AdminError, match="does not answer"):
                serve()
        finally:
            release.set()
        server.close()
        assert not path.exists()
        assert serve().path == path

    def test_a_server_starts_once(self, serve: Serve) -> None:
        server = serve()
        with pytest.raises(AdminError, match="started before"):
            server.start()


class TestLoop:
    def test_a_callback_that_raises_costs_the_others_nothing(self) -> None:
        faults: list[str] = []
        called: list[int] = []
        loop = ServerLoop(lambda: faults.append(repr(sys.exception())))
        broken, sound = os.eventfd(1), os.eventfd(1)

        def fail() -> None:
            os.eventfd_read(broken)
            raise ZeroDivisionError("ring of size 0")

        def succeed() -> None:
            called.append(os.eventfd_read(sound))
            loop.stop()

        loop.watch(broken, fail)
        loop.watch(sound, succeed)
        try:
            loop.run()
        finally:
            loop.close()
            os.close(broken)
            os.close(sound)
        assert faults == ["ZeroDivisionError('ring of size 0')"]
        assert called == [1]


def test_closing_leaves_a_socket_that_another_has_bound_at_its_path(directory: Path) -> None:
    """The claim of a black box's name moves its socket, and the next agent binds the path before the black box ends."""
    prepare_directory(directory)
    clock, path = Clock(), directory / "decode-0.sock"
    services = [
        AdminService("decode-0", handlers(), hello, Metrics(), FlightRecorder(clock, lambda _: None), clock)
        for _ in range(2)
    ]
    services[0].bind(path)
    path.rename(directory / "decode-0.ended-1.sock")
    services[1].bind(path)
    services[0].close()
    assert path.is_socket()
    services[1].close()
    assert not path.exists()
