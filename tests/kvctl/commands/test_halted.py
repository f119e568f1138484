"""Commands on workers that are stopped or have ended, for which an observer answers."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import observer
from kvctl_agent.contract.admin import OBSERVER_SOCKET

S = 1_000_000_000
PAST = ["decode-0.ended-4711"]


@pytest.fixture
def start_ended(start: Any, canned: Any) -> Any:
    """Starts the admin server of an agent that has ended, at a socket with this name."""

    def make(name: str, socket_name: str = "", rooms: int = 3, **handlers: Any) -> None:
        gone = {"ended_age_ns": 180 * S, "ended_why": "killed by SIGKILL", "process_state": "gone"}
        answer = {**canned.status(name), **gone, "turn_age_ns": None, "rooms": {"Transferring": rooms}}
        start(
            socket_name or name,
            {**canned.answers(name), "status": lambda _: answer, **handlers},
            **{"name": name, "pid": 4711, "incarnation": "dead", **gone},
        )

    return make


class TestEnded:
    def test_is_listed_and_counts_as_no_agent_of_the_fleet(self, start: Any, start_ended: Any, kvctl: Any) -> None:
        start("decode-1")
        start_ended("decode-0")
        outcome = kvctl("agents", "-o", "json")
        assert [(row["agent"], row["state"]) for row in outcome.data] == [("decode-0", "ended"), ("decode-1", "ok")]
        assert outcome.code == 0
        assert "decode-0 ended 3 min ago: what is shown of it is as of then" in outcome.err
        outcome = kvctl("status", "-o", "table")
        assert outcome.code == 0
        assert "1 agent, 1 ended" in outcome.out
        assert "1 of 2 ranks answered" in outcome.out
        assert "6 Transferring" not in outcome.out
        assert "✗ KV_PROCESS_ENDED decode-0" in outcome.out

    def test_has_another_name_once_its_own_is_taken(self, start: Any, start_ended: Any, kvctl: Any) -> None:
        start("decode-0")
        start_ended("decode-0", PAST[0])
        found = kvctl("agents", "-o", "json").data
        assert [(row["agent"], row["state"]) for row in found] == [("decode-0", "ok"), (PAST[0], "ended")]
        assert [row["name"] for row in kvctl("status", "-e", "decode-0", "-o", "json").data] == ["decode-0"]
        (row,) = kvctl("status", "-e", PAST[0], "-o", "json").data
        assert (row["name"], row["incarnation"]) == (PAST[0], "c0ffee")
        found = kvctl("rooms", "-o", "json").data
        assert {row["agent"] for row in found} == {"decode-0", PAST[0]}
        outcome = kvctl("status", "-o", "table")
        assert "1 of 2 ranks answered" in outcome.out  # of the instance, which has two

    def test_nobody_waits_for_it_and_nothing_is_asked_of_it(self, start: Any, start_ended: Any, kvctl: Any) -> None:
        drained: list[str] = []

        def drain(name: str) -> Any:
            return lambda _: [drained.append(name), {"subject": "rooms", "result": "draining", "text": ""}][1:]

        start("decode-1", {"drain": drain("decode-1")}, level="admin")
        start_ended("decode-0", drain=drain("decode-0"))
        assert kvctl("wait", "--for", "ready", "--timeout", "5s").code == 0
        assert kvctl("drain", "--all", "--yes").code == 0
        assert drained == ["decode-1"]
        outcome = kvctl("drain", "decode-0", "--yes")
        assert (outcome.code, drained) == (1, ["decode-1"])
        assert "decode-0: it has ended" in outcome.err

    def test_is_recorded(self, start: Any, start_ended: Any, kvctl: Any, tmp_path: Path) -> None:
        start("decode-0")
        start_ended("decode-0", PAST[0])
        recording = tmp_path / "fleet.kvrec"
        assert kvctl("record", str(recording)).code == 0
        found = kvctl("agents", "--from", str(recording), "-o", "json").data
        assert [(row["agent"], row["state"]) for row in found] == [("decode-0", "ok"), (PAST[0], "ended")]
        found = kvctl("doctor", "--from", str(recording), "-o", "json").data
        assert any((row["code"], row["subject"]) == ("KV_PROCESS_ENDED", PAST[0]) for row in found)


class TestStopped:
    @pytest.fixture
    def stopped(self, start: Any, canned: Any) -> str:
        answer = {**canned.status("decode-0"), "process_state": "stopped", "turn_age_ns": 12 * S}
        start("decode-0", {**canned.answers("decode-0"), "status": lambda _: answer}, process_state="stopped", pid=4711)
        start("decode-1")
        return "decode-0"

    def test_is_told_by_every_view(self, stopped: str, kvctl: Any) -> None:
        assert [row["state"] for row in kvctl("agents", "-o", "json").data] == ["stopped", "ok"]
        outcome = kvctl("status", "-o", "table")
        assert outcome.code == 0
        assert "\nstopped  decode-0 is stopped (process 4242)" in outcome.out
        assert "KV_PROCESS_STOPPED" in outcome.out
        outcome = kvctl("doctor", "-o", "json")
        (row,) = [row for row in outcome.data if row["code"] == "KV_PROCESS_STOPPED"]
        assert row["next"] == "kill -CONT 4242"


class TestKilledObserver:
    SCRIPT = """#!{python}
import os, socket, sys, time
from pathlib import Path
assert sys.argv[1:4] == ["-P", "-m", "kvctl_agent.observer"], sys.argv
path = Path(sys.argv[4]) / "observer.ctl"
path.unlink()
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.fspath(path))
listener.listen()
if (pid := os.fork()) == 0:
    time.sleep(60)
else:
    (path.parent / "pid").write_text(str(pid))
"""

    @pytest.fixture
    def killed(self, socket_directory: Path) -> Path:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_directory / OBSERVER_SOCKET))
        return socket_directory

    def test_is_started_again_before_the_agents_are_looked_for(
        self, killed: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A script stands for the observer, and listens at its socket."""
        script = tmp_path / "python"
        script.write_text(self.SCRIPT.format(python=sys.executable))
        script.chmod(0o700)
        monkeypatch.setattr(observer.sys, "executable", str(script))
        assert kvctl("agents").code == 3
        os.kill(int((killed / "pid").read_text()), signal.SIGKILL)

    def test_is_left_alone_where_it_serves_or_has_ended_by_itself(
        self, socket_directory: Path, kvctl: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("an observer was started"))
        kvctl("agents")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(socket_directory / OBSERVER_SOCKET))
            listener.listen()
            kvctl("agents")
