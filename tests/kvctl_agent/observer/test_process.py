"""The observer process and the links of workers: who is served, what outlives whom, and what nobody can do to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
import zmq

from kvctl_agent.contract.admin import MAGIC, OBSERVER_SOCKET, RELAY_SOCKET, ErrorCode, region_directory
from kvctl_agent.contract.commands import Command, Level
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.errors import AdminError, ConfigError, RegionError, RequestRefused
from kvctl_agent.observer import link as link_module
from kvctl_agent.observer.link_messages import Ask, Registered, encode
from kvctl_agent.observer.process import remove_abandoned
from kvctl_agent.telemetry.region import SUFFIX, Cell, Document, Header, RegionWriter
from tests.support.admin_client import ask_relay
from tests.support.observed_workers import (
    Connect,
    Linked,
    at,
    directory,
    elsewhere,
    eventfd_value,
    linked,
    observer,
    reachable,
    served,
)
from tests.support.observers import end_observer, observer_pid
from tests.support.polling import until

__all__ = ["directory", "elsewhere", "linked"]


class Run:
    """`subprocess.run` that notes PYTHONPATH of what it starts, and adds this checkout to it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.environments: list[str] = []
        self._run = run

    def __call__(self, *arguments: Any, env: dict[str, str], **named: Any) -> Any:
        self.environments.append(env["PYTHONPATH"])
        root = os.fspath(Path(link_module.__file__).parents[2])
        return self._run(*arguments, env={**env, "PYTHONPATH": root}, **named)


class TestService:
    def test_it_answers_for_the_worker(self, linked: Any, connect: Connect, directory: Path) -> None:
        worker = linked()
        worker.telemetry.open(7, 1)
        worker.telemetry.flush()
        client = connect(worker.link.path)
        hello = client.ask("hello")["data"]
        assert (hello["name"], hello["pid"], hello["observer"]) == ("decode-0", os.getpid(), "process")
        assert [row["room"] for row in client.ask("rooms")["data"]] == ["7"]
        assert (worker.link.path, worker.link.observer) == (at(directory), "process")
        assert stat.S_IMODE(at(directory).stat().st_mode) == 0o600

    def test_one_process_serves_all_and_is_no_child(self, linked: Any, elsewhere: Any, directory: Path) -> None:
        linked("decode-0")
        pid = observer(directory)
        elsewhere("decode-1,decode-2")
        assert observer(directory) == pid
        assert all(reachable(at(directory, f"decode-{number}")) for number in range(3))
        assert os.getsid(pid) == pid
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        assert str(pid) not in children

    def test_it_is_small_and_imports_no_arrays(self, linked: Any, connect: Connect, directory: Path) -> None:
        client = connect(linked().link.path)
        for command in ("status", "health", "metrics", "peers", "rooms", "staging"):
            assert client.ask(command)["ok"]
        pid = observer(directory)
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert not [name for name in ("numpy", "torch", "libcuda", "nixl") if name in mapped]
        status = Path(f"/proc/{pid}/status").read_text()
        assert int(status.partition("VmRSS:")[2].split()[0]) < 80 << 10

    def test_a_closed_worker_leaves_nothing_and_the_process_ends(
        self, linked: Any, directory: Path, connect: Connect
    ) -> None:
        worker = linked()
        descriptor = os.pidfd_open(observer(directory))
        worker.close()
        assert sorted(path.name for path in directory.iterdir() if "observer" not in path.name) == []
        assert list(region_directory(directory).iterdir()) == []
        try:
            until(lambda: observer_pid(directory) is None, "end of the observer")
        finally:
            os.close(descriptor)
        assert not (directory / OBSERVER_SOCKET).exists()
        assert not region_directory(directory).exists()

    def test_it_finds_the_standard_library_before_other_packages(
        self, linked: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = os.fspath(Path(link_module.__file__).parents[2])
        monkeypatch.setattr("site.getsitepackages", lambda: [root])
        monkeypatch.setenv("PYTHONPATH", "/nowhere")
        monkeypatch.setattr(subprocess, "run", run := Run(subprocess.run))
        linked()
        assert run.environments == ["/nowhere"]

    def test_metrics_and_their_errors(self, linked: Any, directory: Path) -> None:
        worker = linked(metrics_endpoint="127.0.0.1:0")
        url = worker.link.metrics_url
        assert url.startswith("http://127.0.0.1:")
        port = url.split(":")[2].split("/")[0]
        with pytest.raises(ConfigError, match="cannot bind metrics_endpoint"):
            linked("decode-1", metrics_endpoint=f"127.0.0.1:{port}")
        assert not at(directory, "decode-1").exists()

    def test_variables_of_opentelemetry_are_the_workers_own(
        self, linked: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found: list[str | None] = []

        class Collector(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                found.append(self.headers["x-tenant"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Collector) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                for name in ("decode-0", "decode-1"):  # the first one starts the observer
                    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-tenant={name}")
                    worker = linked(name, otel_endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces")
                    record = worker.telemetry.open(7, 1)
                    worker.telemetry.finish(record, time.monotonic_ns())
                    worker.telemetry.flush()
                    until(lambda name=name: name in found, f"span of {name}")  # type: ignore[misc]
            finally:
                server.shutdown()
                thread.join()
        assert found == ["decode-0", "decode-1"]

    def test_a_variable_of_opentelemetry_that_is_no_text_is_left_out(
        self, linked: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_SERVICE_NAME", os.fsdecode(b"d\xe9codeur"))
        worker = linked()
        assert worker.link.observer == "process"
        assert worker.notes == ["its observer does without variables that are not UTF-8: OTEL_SERVICE_NAME"]

    def test_a_registration_that_fails_ends_the_service_of_a_worker_that_was_found(
        self, linked: Any, connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other, reach = linked("decode-0"), link_module.reach_observer

        def late(*arguments: Any) -> socket.socket:
            served(connect, at(directory, "decode-1"))
            return reach(*arguments)

        monkeypatch.setattr(link_module, "reach_observer", late)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            worker = Linked("decode-1", directory, metrics_endpoint=f"127.0.0.1:{taken.getsockname()[1]}")
            with pytest.raises(ConfigError, match="cannot bind metrics_endpoint"):
                worker.link.start()
        monkeypatch.setattr(link_module, "reach_observer", reach)
        worker.close()
        assert not at(directory, "decode-1").exists()
        assert connect(other.link.path).ask("status")["ok"]
        assert linked("decode-2").link.observer == "process", "descriptors of the closed sockets are in use again"
        assert not (directory / f"{OBSERVER_SOCKET}.log").exists()

    def test_a_second_worker_of_the_name_is_refused(self, linked: Any, elsewhere: Any) -> None:
        process = elsewhere("decode-0")
        with pytest.raises(AdminError, match=rf"runs already, pid {process.pid} \(it answers\)"):
            linked("decode-0")


class TestRelay:
    """The observer's own socket, at which it answers for all its workers."""

    def test_each_worker_answers_by_its_name(
        self, linked: Any, elsewhere: Any, connect: Connect, directory: Path
    ) -> None:
        linked("decode-0", {"drain": lambda _: [{"result": "draining"}]})
        process = elsewhere("decode-1")
        relay = connect(directory / RELAY_SOCKET)
        assert stat.S_IMODE((directory / RELAY_SOCKET).stat().st_mode) == 0o600
        for name, pid in (("decode-0", os.getpid()), ("decode-1", process.pid)):
            data = ask_relay(relay, name.encode())["data"]
            assert (data["name"], data["pid"], data["level"]) == (name, pid, "admin")
        assert ask_relay(relay, b"decode-0", b'{"cmd": "drain"}')["data"] == [{"result": "draining"}]
        assert sorted(ask_relay(relay, b"", b"")["data"]) == ["decode-0", "decode-1"]

    def test_one_request_asks_several_workers_several_commands(
        self, linked: Any, elsewhere: Any, connect: Connect, directory: Path
    ) -> None:
        linked("decode-0")
        elsewhere("decode-1")
        relay, found = connect(directory / RELAY_SOCKET), dict[str, Any]()
        bodies, names = b'{"cmd": "hello"}\0{"cmd": "status"}\0{"cmd": "no"}', b"decode-1\0decode-0\0decode-2"
        relay.send(MAGIC, b"7", bodies, names)
        while len(found) < 9:
            found.update(relay.receive()[2])
        assert found.keys() == {f"7.{agent}.{place}" for agent in range(3) for place in range(3)}
        for agent, name in ((0, "decode-1"), (1, "decode-0")):
            assert {found[f"7.{agent}.{place}"]["data"]["name"] for place in (0, 1)} == {name}
            assert found[f"7.{agent}.2"]["error"]["code"] == "unknown-command"
        assert {found[f"7.2.{place}"]["error"]["code"] for place in range(3)} == {"unknown-agent"}

    @pytest.mark.parametrize("name", [b"prefill-9", b"\xff"])
    def test_any_other_name_is_refused(self, linked: Any, connect: Connect, directory: Path, name: bytes) -> None:
        linked()
        assert ask_relay(connect(directory / RELAY_SOCKET), name)["error"]["code"] == "unknown-agent"

    @pytest.mark.parametrize(
        "frames", [(b"1", b"{}"), (b'1"', b"{}", b"decode-0"), (b"1", bytes(200), bytes(200)), (b"1", b"", b"", b"")]
    )
    def test_what_is_no_batch_is_dropped(
        self, linked: Any, connect: Connect, directory: Path, frames: tuple[bytes, ...]
    ) -> None:
        linked()
        relay = connect(directory / RELAY_SOCKET)
        relay.send(MAGIC, *frames)
        assert ask_relay(relay, b"decode-0")["ok"]

    def test_a_client_that_reads_late_gets_all_answers(
        self, linked: Any, connect: Connect, directory: Path, zmq_context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        linked()
        with zmq_context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.rcvhwm, client.sndhwm = 1, 0
            client.connect(f"ipc://{directory / RELAY_SOCKET}")
            for number in range(4000):
                client.send_multipart([MAGIC, b"%d" % number, b'{"cmd": "commands"}', b"decode-0"])
            other = connect(directory / RELAY_SOCKET)
            for _ in range(100):
                ask_relay(other, b"decode-0")
            found, size = list[str](), 0
            while len(found) < 4000:
                assert client.poll(60_000), f"{len(found)} answers"
                *_, replies = client.recv_multipart()
                found += [request_id for request_id, _ in orjson.loads(replies)]
                size += len(replies)
            assert size > 20 << 20
            assert found == [f"{number}.0.0" for number in range(4000)]

    def test_a_path_that_is_too_long_for_it_costs_the_workers_nothing(self, directory: Path, connect: Connect) -> None:
        long = directory / ("d" * (92 - len(os.fspath(directory))))
        worker = Linked("a", long)
        worker.link.start()
        try:
            assert worker.link.observer == "process"
            assert connect(at(long, "a")).ask("hello")["data"]["name"] == "a"
            assert not (long / RELAY_SOCKET).exists()
            assert "too long" in (long / f"{OBSERVER_SOCKET}.log").read_text()
        finally:
            worker.close()
            end_observer(long)


class TestActions:
    def test_they_reach_the_worker_with_their_origin(self, linked: Any, connect: Connect) -> None:
        asked: list[Any] = []

        def drain(args: dict[str, Any]) -> Any:
            asked.append((args, worker.link.client, threading.current_thread().name))
            return [{"result": "draining"}]

        def refuse(args: dict[str, Any]) -> Any:
            raise RequestRefused(ErrorCode.REFUSED, f"no {args['peer']}")

        def broken(_: dict[str, Any]) -> Any:
            raise ZeroDivisionError("ring of size 0")

        worker = linked(handlers={"drain": drain, "forget": refuse, "resume": broken})
        client = connect(worker.link.path)
        assert client.ask("drain")["data"] == [{"result": "draining"}]
        assert asked == [({}, "socket", "kvctl-admin-decode-0")]
        assert client.ask("forget", peer="x")["error"] == {"code": "refused", "message": "no x"}
        error = client.ask("resume")["error"]
        assert error["code"] == "internal"
        assert "ZeroDivisionError: ring of size 0" in error["message"]
        assert any("test_process" in frame for row in client.ask("stacks")["data"] for frame in row["frames"])

    def test_a_tick_that_fails_costs_no_more(self, directory: Path, connect: Connect) -> None:
        def fail() -> None:
            raise ZeroDivisionError("ring of size 0")

        worker = Linked("decode-1", directory, tick=fail)
        try:
            worker.link.start()
            until(lambda: worker.notes == ["ZeroDivisionError: ring of size 0"], "note")
            assert connect(worker.link.path).ask("stacks")["ok"]
        finally:
            worker.close()

    def test_added_commands(self, linked: Any, directory: Path, connect: Connect) -> None:
        worker = Linked("decode-1", directory)
        worker.link.add(Command("fault", "breaks something", Level.ADMIN), lambda _: {"broken": True})
        try:
            worker.link.start()
            assert connect(worker.link.path).ask("fault")["data"] == {"broken": True}
        finally:
            worker.close()

    @pytest.mark.parametrize("turns", [Cell.TURN_NS, Cell.CALL_NS], ids=["control loop", "turns of the engine alone"])
    def test_what_they_have_changed_is_seen_at_once(self, directory: Path, connect: Connect, turns: int) -> None:
        worker = Linked("decode-1", directory)
        region, ending = worker.telemetry.region, threading.Event()
        (row,) = [row for row in load_settings({}).rows() if row["key"] == "pipeline"]

        def publish() -> None:
            while not ending.wait(0.001):
                if (wanted := region.cells[Cell.WANTED]) != region.cells[Cell.SERVED]:
                    value = msgspec.msgpack.encode({"rows": [{**row, "value": worker.notes[-1]}]})
                    region.publish(Document.CONFIG, value, time.monotonic_ns())
                    region.cells[Cell.SERVED] = wanted
                region.cells[turns] = time.monotonic_ns()

        worker.link.replace({"set": lambda args: worker.notes.append(args["value"])}, None)
        worker.notes.append("off")
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            worker.link.start()
            client = connect(worker.link.path)
            for value in map(str, range(5)):
                assert client.ask("config")["ok"]
                assert client.ask("set", key="pipeline", value=value)["ok"]
                assert [row["value"] for row in client.ask("config")["data"]] == [value]
        finally:
            ending.set()
            thread.join()
            worker.close()

    def test_a_late_answer_delays_nobody(self, linked: Any, connect: Connect) -> None:
        entered, release = threading.Event(), threading.Event()

        def drain(_: dict[str, Any]) -> Any:
            entered.set()
            release.wait(60)
            return []

        worker = linked(handlers={"drain": drain})
        slow, other = connect(worker.link.path), connect(worker.link.path)
        answer: list[Any] = []
        thread = threading.Thread(target=lambda: answer.append(slow.ask("drain")))
        thread.start()
        try:
            assert entered.wait(60)
            assert other.ask("rooms")["ok"]
            assert not answer
            thread.join(60)
        finally:
            release.set()
            thread.join(60)
        assert answer[0]["error"]["code"] == "timeout"
        assert "it has not answered within 1.5 s and may still do it" in answer[0]["error"]["message"]

    def test_a_directory_has_several_spellings(self, linked: Any, directory: Path) -> None:
        linked("decode-0")
        worker = Linked("decode-1", directory / ".." / directory.name)
        try:
            assert worker.link.start().observer == "process"
            assert worker.notes == []
        finally:
            worker.close()

    @pytest.mark.parametrize(
        ("times", "observer", "note"), [(1, "process", ""), (3, "thread", "the observer has ended")]
    )
    def test_an_observer_that_is_just_ending(
        self, linked: Any, monkeypatch: pytest.MonkeyPatch, times: int, observer: str, note: str
    ) -> None:
        reach, left = link_module.reach_observer, [None] * times

        def ending(*arguments: Any) -> socket.socket:
            connection = reach(*arguments)
            if left:
                left.pop()
                connection.shutdown(socket.SHUT_RDWR)
            return connection

        monkeypatch.setattr(link_module, "reach_observer", ending)
        worker = linked()
        assert worker.link.observer == observer
        assert note in "".join(worker.notes)

    def test_an_observer_of_another_version(self, linked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, its = socket.socketpair()
        monkeypatch.setattr(link_module, "reach_observer", lambda *_: ours)
        with its:
            its.sendall(b"\x01\0\0\0\x07")
            worker = linked()
        assert worker.link.observer == "thread"
        assert "the observer is of another version" in worker.notes[0]

    def test_a_command_that_comes_with_the_registration(
        self, connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ours, its = socket.socketpair()
        monkeypatch.setattr(link_module, "reach_observer", lambda *_: ours)
        worker = Linked("decode-0", directory, {"drain": lambda _: {}})
        with its:
            its.settimeout(30)
            registered = Registered(str(at(directory)), "", "")
            its.sendall(encode(registered) + encode(Ask(1, "drain", {}, "")))
            worker.link.start()
            while b"answer" not in its.recv(1 << 16):
                pass
            its.shutdown(socket.SHUT_RDWR)
            monkeypatch.undo()
            worker.close()

    def test_only_an_eventfd_is_written(self, connect: Connect, directory: Path) -> None:
        worker = Linked("decode-0", directory)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            worker.link.replace({}, writing)
            worker.link.start()
            assert connect(worker.link.path).ask("status")["ok"]
            with pytest.raises(BlockingIOError):
                os.read(reading, 8)
            woken = os.eventfd(0, os.EFD_NONBLOCK)
            worker.link.replace({}, woken)
            until(lambda: connect(worker.link.path).ask("status") and eventfd_value(woken), "wake")
            worker.link.replace({}, None)
            os.close(woken)
        finally:
            os.close(reading)
            os.close(writing)
            worker.close()


class TestEndOfTheObserver:
    def test_a_killed_one_is_replaced_and_knows_the_active_rooms(
        self, linked: Any, connect: Connect, directory: Path
    ) -> None:
        worker = linked()
        worker.telemetry.open(7, 1)
        worker.telemetry.flush()
        before = observer(directory)
        end_observer(directory, signal.SIGKILL)
        hello = served(connect, at(directory))
        assert hello["pid"] == os.getpid()
        assert observer(directory) != before
        assert [row["room"] for row in connect(at(directory)).ask("rooms")["data"]] == ["7"]
        assert worker.notes == []

    def test_replies_are_numbered_on(self, linked: Any, connect: Connect, directory: Path) -> None:
        linked()
        first = connect(at(directory)).ask("status")["sequence"]
        end_observer(directory, signal.SIGKILL)
        served(connect, at(directory))
        assert connect(at(directory)).ask("status")["sequence"] > first

    def test_ports_stay(self, linked: Any, connect: Connect, directory: Path) -> None:
        worker = linked(metrics_endpoint="127.0.0.1:0")
        url = worker.link.metrics_url
        end_observer(directory, signal.SIGKILL)
        served(connect, at(directory))
        assert connect(at(directory)).ask("status")["data"]["metrics_url"] == url

    def test_killed_at_random_under_load(self, linked: Any, elsewhere: Any, connect: Connect, directory: Path) -> None:
        workers = [linked(f"decode-{number}") for number in range(3)]
        elsewhere("decode-3,decode-4")
        ending = threading.Event()

        def load(worker: Linked) -> None:
            telemetry, room = worker.telemetry, 0
            while not ending.wait(0.0002):
                record = telemetry.open(room := room + 1, 1)
                telemetry.finish(record, time.monotonic_ns())
                telemetry.flush()

        threads = [threading.Thread(target=load, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        any_number = random.Random(5)
        try:
            for _ in range(4):
                pid = until(lambda: observer_pid(directory), "observer")
                time.sleep(any_number.random() * 1.5)  # at any moment of its start and its work
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                until(lambda pid=pid: observer_pid(directory) != pid, "end of the observer")  # type: ignore[misc]
            for number in range(5):
                assert served(connect, at(directory, f"decode-{number}"))["ended_age_ns"] is None
        finally:
            ending.set()
            for thread in threads:
                thread.join()
        done = workers[0].telemetry.metrics.total("kvctl_rooms_finished_total")
        families = {family["name"]: family for family in connect(at(directory)).ask("metrics")["data"]}
        finished = sum(sample["value"] for sample in families["kvctl_rooms_finished_total"]["samples"])
        assert finished == done > 0

    def test_garbage_costs_nobody_anything(self, linked: Any, connect: Connect, directory: Path) -> None:
        worker = linked()
        before, any_number = observer(directory), random.Random(3)
        path = os.fspath(directory / OBSERVER_SOCKET)
        for _ in range(200):
            with socket.socket(socket.AF_UNIX) as stranger, contextlib.suppress(OSError):
                stranger.connect(path)
                stranger.sendall(any_number.randbytes(any_number.randrange(600)))
        silent = [socket.socket(socket.AF_UNIX) for _ in range(100)]
        try:
            for each in silent:
                each.connect(path)
            assert linked("decode-1").link.observer == "process"
        finally:
            for each in silent:
                each.close()
        assert connect(worker.link.path).ask("status")["ok"]
        assert observer(directory) == before

    def test_foreign_regions_are_left_alone(self, linked: Any, connect: Connect, directory: Path) -> None:
        worker = linked()
        regions = region_directory(directory)
        (regions / f"junk{SUFFIX}").write_bytes(os.urandom(10_000))
        (regions / f"empty{SUFFIX}").touch()
        (regions / f"link{SUFFIX}").symlink_to("/etc/passwd")
        linked("decode-1")
        assert connect(worker.link.path).ask("status")["ok"]
        for name in ("junk", "empty", "link"):
            (regions / f"{name}{SUFFIX}").unlink(missing_ok=True)

    def test_of_many_that_start_at_once_one_stays(self, directory: Path) -> None:
        command = [sys.executable, "-m", "kvctl_agent.observer", str(directory)]
        started = [subprocess.Popen(command) for _ in range(6)]
        assert [process.wait(60) for process in started] == [0] * 6

        def running() -> list[int]:
            processes = (each for each in Path("/proc").iterdir() if each.name.isdigit())
            return [int(each.name) for each in processes if str(directory) in command_of(each).split("\0")]

        until(lambda: running() == [observer(directory)], "end of the others")

    def test_regions_that_others_have_left_are_removed(self, linked: Any, directory: Path) -> None:
        old = time.time() - 4000
        abandoned, observed = (directory.with_name(f"{directory.name}{suffix}") for suffix in "ab")
        regions = [region_directory(each) for each in (abandoned, observed)]
        with contextlib.ExitStack() as kept:
            for sockets, where in zip((abandoned, observed), regions, strict=True):
                sockets.mkdir(mode=0o700)
                kept.callback(shutil.rmtree, sockets)
                where.mkdir(mode=0o700)
                kept.callback(shutil.rmtree, where, ignore_errors=True)
                path = where / f"decode-0{SUFFIX}"
                writer = RegionWriter(Header.of_this_process("decode", "decode-0", str(sockets)), where / "written")
                shutil.copyfile(where / "written", path)
                path.chmod(0o600)
                writer.close()
                os.utime(path, (old, old))
                os.utime(where, (old, old))
            lock = kept.enter_context((observed / f"{OBSERVER_SOCKET}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            linked()
            assert [where.exists() for where in regions] == [False, True]
            assert [path.name for path in regions[1].iterdir()] == [f"decode-0{SUFFIX}"]

    def test_nothing_else_in_shared_memory_is_removed(self, tmp_path: Path) -> None:
        own = region_directory(tmp_path)
        prefix, old = f"kvctl-{os.geteuid()}-", time.time() - 4000
        target, named = tmp_path / "target", own.with_name(f"{prefix}00bad000")
        link, other = own.with_name(f"{prefix}00bad001"), own.with_name(f"{prefix}00bad002.mine")
        kept = [target / f"a{SUFFIX}", other / f"a{SUFFIX}", named / "id_rsa"]
        with contextlib.ExitStack() as made:
            for path in (target, named, other):
                path.mkdir(mode=0o700)
                made.callback(shutil.rmtree, path)
            for path in (*kept, named / f"a{SUFFIX}"):
                path.touch(mode=0o600)
                os.utime(path, (old, old))
            for path in (target, named, other):
                os.utime(path, (old, old))
            link.symlink_to(target)
            made.callback(link.unlink)
            remove_abandoned(own)
            assert [path.exists() for path in kept] == [True] * 3
            assert [path.name for path in named.iterdir()] == ["id_rsa"]

    def test_it_ends_when_its_directory_is_removed(self, linked: Any, directory: Path) -> None:
        linked().close()
        pid = observer(directory)
        (directory / OBSERVER_SOCKET).unlink()
        until(lambda: not Path(f"/proc/{pid}").exists(), "end of the observer")

    def test_with_its_directory_the_black_boxes_go(self, elsewhere: Any, connect: Connect, directory: Path) -> None:
        process = elsewhere("decode-0")
        process.kill()
        until(lambda: connect(at(directory)).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        pid = observer(directory)

        def removed() -> bool:
            shutil.rmtree(directory, ignore_errors=True)  # the observer removes files of its own meanwhile
            return not directory.exists()

        until(removed, "removal of the directory")
        until(lambda: not Path(f"/proc/{pid}").exists(), "end of the observer")
        directory.mkdir()  # for the checks after the test
        assert not region_directory(directory).exists()


def command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


class TestWithoutProcess:
    def test_no_exec(self, linked: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        worker = linked()
        assert worker.link.observer == "thread"
        assert connect(worker.link.path).ask("hello")["data"]["observer"] == "thread"
        (note,) = worker.notes
        assert "no observer process serves this agent" in note
        assert "/nonexistent/python" in note

    def test_no_room_in_shared_memory(self, linked: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: Any) -> int:
            raise RegionError("/dev/shm has too little room for a region: No space left on device")

        monkeypatch.setattr(link_module, "fitting_log_bytes", full)
        worker = linked()
        assert connect(worker.link.path).ask("hello")["data"]["observer"] == "thread"
        assert "No space left" in worker.notes[0]

    def test_an_observer_in_another_network_namespace(
        self, linked: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        linked("decode-0")
        monkeypatch.setattr(link_module, "namespace", lambda _: 1)
        worker = linked("decode-1")
        assert connect(worker.link.path).ask("hello")["data"]["observer"] == "thread"
        assert "the observer of this socket directory is in another network namespace" in worker.notes[0]

    def test_observers_that_end_again_and_again(
        self, linked: Any, connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = linked()
        worker.telemetry.open(7, 1)
        worker.telemetry.flush()
        monkeypatch.setattr(sys, "executable", "/bin/false")
        end_observer(directory, signal.SIGKILL)
        until(lambda: worker.link.observer == "thread", "thread")
        client = connect(worker.link.path)
        assert client.ask("hello")["data"]["observer"] == "thread"
        assert [row["room"] for row in client.ask("rooms")["data"]] == ["7"]
        assert len(worker.notes) == 1
