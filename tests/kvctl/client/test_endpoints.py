"""Discovery of live and stale sockets, and the values of `-e`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.endpoints import discover
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from tests.support.users import NOBODY, listen_as, needs_root


def leave_socket(directory: Path, name: str) -> Path:
    """Creates a stale socket, as a killed process leaves it."""
    path = directory / f"{name}.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(os.fspath(path))
    return path


def test_living_agents_are_told_from_dead_sockets(start: Any, socket_directory: Path) -> None:
    start("decode-0")
    leave_socket(socket_directory, "decode-1")
    found = discover()
    assert [endpoint.name for endpoint in found.live] == ["decode-0"]
    assert [endpoint.name for endpoint in found.stale] == ["decode-1"]
    assert found.faults == []


def test_names_globs_and_addresses_choose(fleet: Any, socket_directory: Path) -> None:
    def names(*wanted: str) -> list[str]:
        return [endpoint.name for endpoint in discover(wanted).live]

    assert names("decode-1") == ["decode-1"]
    assert names("decode-*") == ["decode-0", "decode-1"]
    assert names(f"ipc://{socket_directory}/prefill-0.sock") == ["prefill-0"]
    assert names(str(socket_directory / "prefill-1.sock")) == ["prefill-1"]
    assert names("decode-0", "decode-*") == ["decode-0", "decode-1"]


def test_a_missing_name_is_a_fault_with_a_near_match(fleet: Any) -> None:
    (fault,) = discover(["decode0"]).faults
    assert fault.code == "unreachable"
    assert "did you mean decode-0" in fault.message


def test_a_named_dead_agent_is_a_fault(socket_directory: Path) -> None:
    path = leave_socket(socket_directory, "decode-9")
    for wanted in ("decode-9", f"ipc://{path}"):
        (fault,) = discover([wanted]).faults
        assert "left its socket" in fault.message
    (fault,) = discover([f"ipc://{socket_directory}/nothing.sock"]).faults
    assert fault.message == f"there is no socket {socket_directory}/nothing.sock"
    (fault,) = discover([f"ipc://{socket_directory}/decode9.sock"]).faults
    assert fault.message.endswith("/decode9.sock, did you mean decode-9?")


def test_tcp_is_believed_until_it_is_asked_and_other_schemes_are_unknown(surroundings: None) -> None:
    (endpoint,) = discover(["tcp://host:5000", "tcp://host:5000"]).live
    assert (endpoint.address, endpoint.path, endpoint.named) == ("tcp://host:5000", None, True)
    with pytest.raises(CliError, match="write tcp://host:port") as refused:
        discover(["tcp://host"])
    assert refused.value.code is ExitCode.USAGE
    with pytest.raises(CliError, match="ftp:// is not an address"):
        discover(["ftp://host"])
    with pytest.raises(CliError, match="107 bytes"):
        discover(["ipc:///" + "x" * 120])


@needs_root
def test_a_socket_of_another_user_is_a_fault_and_is_asked_nothing(socket_directory: Path, kvctl: Any) -> None:
    socket_directory.chmod(0o1777)
    with listen_as(NOBODY, socket_directory / "decode-0.sock"):
        for wanted in ([], [str(socket_directory / "decode-0.sock")]):
            found = discover(wanted)
            assert found.live == []
            (fault,) = found.faults
            assert fault.code == "not-permitted"
            assert f"uid {NOBODY} listens on {socket_directory}/decode-0.sock" in fault.message
        told = kvctl("-e", f"registry://{socket_directory}/decode-0.sock", "agents")
        assert f"uid {NOBODY} listens on" in told.err
    (socket_directory / "decode-0.sock").unlink()


def test_an_open_directory_is_a_fault_that_names_the_remedy(socket_directory: Path) -> None:
    leave_socket(socket_directory, "decode-0")
    socket_directory.chmod(0o777)
    (fault,) = discover().faults
    assert f"lets other users write to it: chmod go-w {socket_directory}" in fault.message
    socket_directory.chmod(0o700)


def test_a_foreign_directory_is_not_permitted(socket_directory: Path) -> None:
    """Runs in a process without root privileges, because root may read every directory."""
    code = (
        "import os; from kvctl.client.endpoints import discover; from kvctl.errors import CliError\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: discover()\n"
        "except CliError as error: print(error.code.name, error)"
    )
    socket_directory.chmod(0)
    try:
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    finally:
        socket_directory.chmod(0o700)
    assert said.stdout.startswith("NOT_PERMITTED ")
    assert "another user" in said.stdout


def test_many_dead_sockets_cost_little(socket_directory: Path) -> None:
    for number in range(256):
        leave_socket(socket_directory, f"a{number}")
    started = time.monotonic()
    assert len(discover().stale) == 256
    assert time.monotonic() - started < 20  # milliseconds; a wait for each of them would take longer


def test_agents_that_their_observer_serves_are_not_probed(socket_directory: Path) -> None:
    asked: list[Path] = []

    def served(directory: Path) -> set[str]:
        asked.append(directory)
        return {f"a{number}" for number in range(20)}

    for number in range(22):
        leave_socket(socket_directory, f"a{number}")
    found = discover(served=served)
    assert len(found.live) == 20
    assert [endpoint.name for endpoint in found.stale] == ["a20", "a21"]
    assert not discover(["a1", "a2"], served=served).live
    assert asked == [socket_directory], "a few are probed"
