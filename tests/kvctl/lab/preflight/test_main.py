"""How the process of a rank ends: `python -m kvctl.lab.preflight`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

WAIT_S = 120
COMMAND = [sys.executable, "-m", "kvctl.lab.preflight"]


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    """The process of a rank that has answered a command, and whose standard input stays open."""
    pipe = subprocess.PIPE
    with subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line("clock"))
        process.stdin.flush()
        assert msgspec.json.decode(process.stdout.readline())["kind"] == "answer"
        yield process
        process.kill()


def line(command: str) -> bytes:
    return msgspec.json.encode({"do": command, "args": {}}) + b"\n"


def test_a_failed_command_ends_it_while_its_input_is_open(rank: subprocess.Popen[bytes]) -> None:
    assert rank.stdin is not None
    assert rank.stdout is not None
    assert rank.stderr is not None
    rank.stdin.write(line("write"))  # lacks its arguments
    rank.stdin.flush()
    answer = msgspec.json.decode(rank.stdout.readline())
    assert (answer["kind"], answer["data"]["code"]) == ("fatal", "TypeError")
    assert (rank.wait(WAIT_S), rank.stderr.read()) == (1, b"")


def test_a_signal_ends_it_while_its_input_is_open(rank: subprocess.Popen[bytes]) -> None:
    assert rank.stderr is not None
    rank.send_signal(signal.SIGTERM)
    assert (rank.wait(WAIT_S), rank.stderr.read()) == (0, b"")


def test_commands_that_come_in_pieces_and_together_are_carried_out_until_the_input_ends(
    rank: subprocess.Popen[bytes],
) -> None:
    commands = line("clock") * 3
    assert rank.stdin is not None
    assert rank.stdout is not None
    for piece in (commands[:5], commands[5:-7], commands[-7:]):
        rank.stdin.write(piece)
        rank.stdin.flush()
    assert [msgspec.json.decode(rank.stdout.readline())["kind"] for _ in range(3)] == ["answer"] * 3
    rank.stdin.close()
    assert rank.wait(WAIT_S) == 0
