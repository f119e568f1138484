"""Agents that answer by themselves, and whose process is stopped or has ended: their faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import endpoints
from kvctl.client.endpoints import agent_pid, discover, stopped_pid

AGENT = """
import sys, time
from pathlib import Path
from kvctl_agent.observer.server import SERVED_HERE
from tests.support.admin_server import AdminServer
from kvctl_agent.contract.commands import COMMANDS

handlers = {command.name: lambda _: [] for command in COMMANDS if command.name not in SERVED_HERE}
with AdminServer(sys.argv[1], handlers, lambda: {}, Path(sys.argv[2]), endpoint="127.0.0.1:5555"):
    print(flush=True)
    time.sleep(600)
"""
MORE_THAN_THE_BACKLOG = 150


@pytest.fixture
def other(socket_directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the agent decode-9 in a separate process."""
    command = [sys.executable, "-c", AGENT, "decode-9", str(socket_directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
    for path in socket_directory.glob("decode-9.*"):
        path.unlink()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def test_the_process_of_an_agent_is_found_by_its_lock_file(
    other: subprocess.Popen[bytes], socket_directory: Path
) -> None:
    path = socket_directory / "decode-9.sock"
    assert agent_pid(path) == other.pid
    assert stopped_pid(path) is None
    stop(other)
    assert agent_pid(path) == other.pid
    assert stopped_pid(path) == other.pid
    (socket_directory / "decode-8.lock").write_text(f"{other.pid}\n")  # a number that is another process's by now
    assert agent_pid(socket_directory / "decode-8.sock") is None
    assert stopped_pid(socket_directory / "decode-8.sock") is None
    (socket_directory / "decode-8.lock").write_text("no number")
    assert agent_pid(socket_directory / "decode-8.sock") is None
    (socket_directory / "decode-8.lock").unlink()
    assert agent_pid(socket_directory / "decode-8.sock") is None


def test_the_files_of_a_process_that_runs_are_not_looked_at_to_see_whether_it_is_stopped(
    other: subprocess.Popen[bytes], socket_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(pid: int) -> Iterator[os.stat_result]:
        raise AssertionError(f"process {pid}, which may have thousands of files")

    path = socket_directory / "decode-9.sock"
    monkeypatch.setattr(endpoints, "_open_files", looked)
    assert stopped_pid(path) is None
    stop(other)
    with pytest.raises(AssertionError):
        stopped_pid(path)


def test_a_socket_that_refuses_while_its_agent_runs_is_waited_for(socket_directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, (socket_directory / "decode-7.lock").open("w+") as lock:
        listener.bind(str(socket_directory / "decode-7.sock"))
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert [endpoint.name for endpoint in discover().live] == ["decode-7"]
        lock.truncate(0)
        assert [endpoint.name for endpoint in discover().stale] == ["decode-7"]


def test_it_is_named_however_often_one_looks(other: subprocess.Popen[bytes], start: Any, kvctl: Any) -> None:
    start("decode-0")
    stop(other)
    said = f"decode-9: its process {other.pid} is stopped; `kill -CONT {other.pid}` lets it go on"
    for _ in range(MORE_THAN_THE_BACKLOG):
        assert [endpoint.name for endpoint in discover().live] == ["decode-0", "decode-9"]
    for command in ("status", "agents"):
        outcome = kvctl(command, "-o", "json", "--timeout", "1s")
        assert outcome.code == 7
        assert said in outcome.err
        assert [error["code"] for error in json.loads(outcome.out)["errors"]] == ["stopped"]
    assert "stopped" in kvctl("status", "-o", "tsv", "--timeout", "1s").out  # it has a row
    assert said in kvctl("check", "ready", "--timeout", "1s").out
    assert f"`kill -CONT {other.pid}`" in kvctl("doctor", "-o", "json", "--timeout", "1s").out
    assert kvctl("status", "-e", "decode-9", "--timeout", "1s").code == 4
    other.send_signal(signal.SIGCONT)
    assert kvctl("stacks", "-e", "decode-9", "--timeout", "60s", "-o", "json").code in {0, 6}  # it listens again


def test_kvctl_itself_says_when_it_has_too_few_descriptors(start: Any, socket_directory: Path) -> None:
    start("decode-0")
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)); import kvctl.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code, "agents"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "more file descriptors are needed" in done.stderr
    assert "the limit is 10 (ulimit -n)" in done.stderr
