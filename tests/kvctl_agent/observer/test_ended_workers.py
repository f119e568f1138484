"""Workers that have ended, been stopped or hang: what the observer still tells of them, and for how long."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvctl.cli import run
from kvctl_agent.contract.admin import ENDED_SUFFIX, OBSERVER_SOCKET, RELAY_SOCKET, region_directory
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.host.sockets import prune_black_boxes
from kvctl_agent.telemetry.region import NEW_SUFFIX, SUFFIX, Document
from tests.support.admin_client import ask_relay
from tests.support.observed_workers import (
    Connect,
    Linked,
    at,
    directory,
    elsewhere,
    linked,
    observer,
    served,
)
from tests.support.observers import end_observer
from tests.support.polling import until

__all__ = ["directory", "elsewhere", "linked"]


class TestEndOfTheWorker:
    def test_a_killed_one_leaves_a_black_box(self, elsewhere: Any, connect: Connect, directory: Path) -> None:
        process = elsewhere("decode-0")
        client = connect(at(directory))
        assert client.ask("hello")["data"]["ended_age_ns"] is None
        process.kill()
        until(lambda: client.ask("hello")["data"]["ended_age_ns"] is not None, "black box", 2)
        assert client.ask("hello")["data"]["pid"] == process.pid
        assert [row["room"] for row in client.ask("rooms")["data"]] == ["7"]
        assert client.ask("drain")["error"]["code"] == "refused"

    def test_a_black_box_goes_with_its_region(self, elsewhere: Any, connect: Connect, directory: Path) -> None:
        elsewhere("decode-1")
        process = elsewhere("decode-0")
        process.kill()
        until(lambda: connect(at(directory)).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        (region,) = region_directory(directory).glob("decode-0.*")
        region.unlink()
        until(lambda: not at(directory).exists(), "end of its service")
        assert connect(at(directory, "decode-1")).ask("hello")["data"]["ended_age_ns"] is None

    def test_pruning_discards_it_and_leaves_those_that_run(
        self, elsewhere: Any, connect: Connect, directory: Path
    ) -> None:
        elsewhere("decode-1")
        process, path = elsewhere("decode-0.5"), at(directory, "decode-0.5")
        process.kill()
        until(lambda: connect(path).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        assert prune_black_boxes(directory) == ["decode-0.5"]
        until(lambda: not path.exists(), "end of its service")
        assert connect(at(directory, "decode-1")).ask("hello")["data"]["ended_age_ns"] is None
        assert prune_black_boxes(directory) == []

    def test_one_whose_region_was_removed_before_leaves_nothing(
        self, elsewhere: Any, connect: Connect, directory: Path
    ) -> None:
        elsewhere("decode-1")
        process = elsewhere("decode-0")
        pid = observer(directory)
        (region,) = region_directory(directory).glob("decode-0.*")
        region.unlink()
        process.kill()
        until(lambda: not at(directory).exists(), "end of its service")
        assert connect(at(directory, "decode-1")).ask("hello")["data"]["ended_age_ns"] is None
        assert observer(directory) == pid

    def test_its_name_can_be_taken_over(self, linked: Any, elsewhere: Any, connect: Connect, directory: Path) -> None:
        process = elsewhere("decode-0")
        process.kill()
        process.wait()
        until(lambda: connect(at(directory)).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        linked("decode-0")
        assert connect(at(directory)).ask("hello")["data"]["pid"] == os.getpid()
        former = connect(at(directory, f"decode-0.ended-{process.pid}"))
        assert former.ask("hello")["data"]["pid"] == process.pid
        assert [row["room"] for row in former.ask("rooms")["data"]] == ["7"]

    def test_the_relay_does_not_answer_with_it_for_a_worker_that_serves_itself(
        self, linked: Any, elsewhere: Any, connect: Connect, directory: Path
    ) -> None:
        process = elsewhere("decode-0")
        process.kill()
        process.wait()
        until(lambda: connect(at(directory)).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        relay = connect(directory / RELAY_SOCKET)
        assert ask_relay(relay, b"decode-0")["data"]["pid"] == process.pid
        linked("decode-0", observer="thread")
        assert ask_relay(relay, b"decode-0")["error"]["code"] == "unknown-agent"
        assert connect(at(directory)).ask("hello")["data"]["pid"] == os.getpid()
        former = f"decode-0.ended-{process.pid}"

        def names() -> list[str]:
            found: list[str] = ask_relay(relay, b"", b"")["data"]
            assert "decode-0" not in found
            return found

        until(lambda: names() == [former], "new name of the black box")
        assert ask_relay(relay, former.encode())["data"]["pid"] == process.pid

    def test_another_observer_goes_on_with_it(
        self, elsewhere: Any, linked: Any, connect: Connect, directory: Path
    ) -> None:
        process = elsewhere("decode-0")
        linked("decode-1")
        process.kill()
        until(lambda: connect(at(directory)).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        process.wait()  # before, the kernel told its status
        end_observer(directory, signal.SIGKILL)
        again = served(connect, at(directory))
        assert again["ended_age_ns"] is not None
        assert again["ended_why"] == "killed by SIGKILL"
        assert [row["room"] for row in connect(at(directory)).ask("rooms")["data"]] == ["7"]

    def test_one_that_was_killed_with_the_observer(
        self, elsewhere: Any, linked: Any, connect: Connect, directory: Path
    ) -> None:
        process = elsewhere("decode-0")
        os.kill(observer(directory), signal.SIGSTOP)
        process.kill()
        process.wait()
        end_observer(directory, signal.SIGKILL)
        linked("decode-1")
        assert served(connect, at(directory))["ended_age_ns"] is not None

    def test_a_stopped_one_is_seen(self, elsewhere: Any, connect: Connect, directory: Path) -> None:
        process = elsewhere("decode-0")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        client = connect(at(directory))
        status = client.ask("status")["data"]
        assert (status["process_state"], status["ended_age_ns"]) == ("stopped", None)
        assert [row["room"] for row in client.ask("rooms")["data"]] == ["7"]
        error = client.ask("drain")["error"]
        assert error["code"] == "timeout"
        assert "stopped" in error["message"]

    def test_a_stopped_one_is_found_by_another_observer(
        self, elsewhere: Any, linked: Any, connect: Connect, directory: Path
    ) -> None:
        process = elsewhere("decode-0")
        linked("decode-1")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        end_observer(directory, signal.SIGKILL)
        hello = served(connect, at(directory))
        assert (hello["pid"], hello["ended_age_ns"]) == (process.pid, None)
        client = connect(at(directory))
        assert [row["room"] for row in client.ask("rooms")["data"]] == ["7"]
        assert client.ask("drain")["error"]["code"] == "timeout"
        process.send_signal(signal.SIGCONT)
        until(lambda: connect(at(directory)).ask("drain")["error"]["code"] == "refused", "registration")

    def test_one_that_hangs_with_the_interpreter(
        self, elsewhere: Any, linked: Any, connect: Connect, directory: Path
    ) -> None:
        process = elsewhere("decode-0", "hang")
        linked("decode-1")
        for number in (None, signal.SIGKILL):
            if number is not None:
                end_observer(directory, number)
            hello = served(connect, at(directory))
            assert (hello["pid"], hello["ended_age_ns"]) == (process.pid, None)
            client = connect(at(directory))
            assert [row["room"] for row in client.ask("rooms")["data"]] == ["7"]
            assert client.ask("status")["ok"]
            assert client.ask("drain")["error"]["code"] == "timeout"

    def test_one_whose_child_lives_on(self, elsewhere: Any, connect: Connect, directory: Path) -> None:
        process = elsewhere("decode-0", "fork")
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        try:
            process.kill()
            until(lambda: connect(at(directory)).ask("hello")["data"]["ended_age_ns"] is not None, "black box")
        finally:
            os.kill(int(child), signal.SIGKILL)

    def test_one_whose_region_was_removed(self, elsewhere: Any, linked: Any, connect: Connect, directory: Path) -> None:
        process = elsewhere("decode-0")
        linked("decode-1")
        pid = observer(directory)
        for path in region_directory(directory).glob(f"decode-0.*{SUFFIX}"):
            path.unlink()
        process.kill()
        until(lambda: not at(directory).exists(), "end of the service")
        assert connect(at(directory, "decode-1")).ask("status")["ok"]
        assert observer(directory) == pid
        assert not (directory / f"{OBSERVER_SOCKET}.log").exists()

    def test_one_that_has_not_registered_has_the_limits_that_it_has_published(
        self, linked: Any, connect: Connect, directory: Path
    ) -> None:
        linked("decode-0")
        worker = Linked("decode-1", directory, recorder_events=16)
        region = worker.telemetry.region
        rows = [{**row, "value": 16} for row in load_settings({}).rows() if row["key"] == "recorder_events"]
        region.publish(Document.CONFIG, msgspec.msgpack.encode({"rows": rows}), time.monotonic_ns())
        for number in range(20):
            worker.telemetry.recorder.record("test", f"event {number}")
        worker.telemetry.flush()
        assert region.path is not None
        region.move(region.path.with_suffix(SUFFIX))
        try:
            served(connect, at(directory, "decode-1"))
            events = connect(at(directory, "decode-1")).ask("events")["data"]["events"]
            assert [event["text"] for event in events] == [f"event {number}" for number in range(4, 20)]
        finally:
            worker.close()

    def test_another_observer_keeps_it_as_long_as_the_worker_has_published(
        self, elsewhere: Any, linked: Any, connect: Connect, directory: Path
    ) -> None:
        for name in ("decode-0", "decode-1"):
            worker = Linked(name, directory)
            region, keep_s = worker.telemetry.region, 5000 if name == "decode-0" else 60
            rows = [{**row, "value": keep_s} for row in load_settings({}).rows() if row["key"] == "black_box_s"]
            region.publish(Document.CONFIG, msgspec.msgpack.encode({"rows": rows}), time.monotonic_ns())
            assert region.path is not None
            ended = region.path.with_suffix(ENDED_SUFFIX)
            shutil.copyfile(region.path, ended)
            ended.chmod(0o600)
            age_s = time.time() - (4000 if name == "decode-0" else 100)
            os.utime(ended, (age_s, age_s))
            worker.close()
        linked("decode-2")
        assert served(connect, at(directory))["ended_age_ns"] is not None
        until(lambda: not list(region_directory(directory).glob(f"decode-1.*{ENDED_SUFFIX}")), "end of the black box")

    @pytest.mark.parametrize("suffix", [SUFFIX, ENDED_SUFFIX])
    def test_a_region_that_cannot_be_opened_goes_in_time(self, linked: Any, directory: Path, suffix: str) -> None:
        linked()
        young, old = (region_directory(directory) / f"decode-{number}.1.1{suffix}" for number in (1, 2))
        for path, age_s in ((young, 3000), (old, 4000)):
            path.touch(mode=0o600)
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        until(lambda: not old.exists(), "end of the old one")
        assert young.exists()
        young.unlink()

    def test_of_many_some_are_kept(self, elsewhere: Any, linked: Any, directory: Path) -> None:
        linked("prefill-0")
        elsewhere(",".join(f"decode-{number}" for number in range(18))).kill()
        regions = region_directory(directory)
        until(lambda: not list(regions.glob(f"decode-*{SUFFIX}")), "end of the workers")
        until(lambda: len(list(regions.glob(f"*{ENDED_SUFFIX}"))) == 16, "end of two black boxes")
        kept = {path.name.partition(".")[0] for path in regions.glob(f"*{ENDED_SUFFIX}")}
        until(lambda: {path.stem for path in directory.glob("decode-*.sock")} == kept, "end of their sockets")

    def test_a_region_of_an_agent_that_was_never_started_goes_in_time(self, linked: Any, directory: Path) -> None:
        def left(name: str, age_s: float) -> Path:
            path = regions / f"{name}.1.1{NEW_SUFFIX}"
            path.touch(mode=0o600)
            os.utime(path, (time.time() - age_s, time.time() - age_s))
            return path

        linked()
        regions = region_directory(directory)
        young = left("decode-1", 10)
        for name in ("decode-2", "decode-3"):
            old = left(name, 100)
            until(lambda old=old: not old.exists(), "end of the old one")  # type: ignore[misc]
        assert young.exists(), "its agent may be about to lock it"
        young.unlink()

    def test_none_is_kept_if_that_is_set(
        self, elsewhere: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVCTL_BLACK_BOX_S", "0")
        process = elsewhere("decode-0")
        process.kill()
        until(lambda: not at(directory).exists(), "end of the service")
        assert list(region_directory(directory).iterdir()) == []


class TestStoppedObserver:
    def test_kvctl_names_it_whenever_it_is_stopped(
        self, elsewhere: Any, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """At any time: while it starts to serve, while clients ask, and with a full backlog of clients."""
        monkeypatch.setenv("KVCTL_SOCKET_DIR", os.fspath(directory))
        elsewhere("decode-0,decode-1")
        dice, clients = random.Random(7), contextlib.ExitStack()
        with clients:
            for attempt in range(6):
                time.sleep(dice.random() * 0.3)
                pid = observer(directory)
                os.kill(pid, signal.SIGSTOP)
                for path in (at(directory), at(directory, "decode-1")) if attempt == 5 else ():
                    while (client := clients.enter_context(socket.socket(socket.AF_UNIX))) is not None:
                        client.setblocking(False)
                        if client.connect_ex(os.fspath(path)) != 0:
                            break
                began = time.monotonic()
                assert run(["status", "--timeout", "1s"]) == 4
                assert time.monotonic() - began < 10  # on a machine with other work
                said = f"decode-0, decode-1: its observer {pid} is stopped; `kill -CONT {pid}` lets it go on"
                assert said in capsys.readouterr().err
                os.kill(pid, signal.SIGCONT)
                clients.close()
                until(lambda: run(["agents", "--timeout", "10s"]) == 0, "answers")
        os.kill(observer(directory), signal.SIGSTOP)
        end_observer(directory, signal.SIGKILL)
        until(lambda: run(["agents", "--timeout", "10s"]) == 0, "another observer")
