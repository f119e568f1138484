"""`-w` on a pseudo terminal: tables on the alternate screen, which is left at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
ROWS, COLUMNS = 24, 100


class Terminal:
    """A `kvctl` process on a pseudo terminal."""

    def __init__(self, *args: str, **environment: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "COLUMNS", "LINES"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvctl", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm-256color", "KVCTL_TIMEOUT": "30s", **environment},
        )
        os.close(theirs)
        self.seen = ""

    def until(self, what: str, times: int = 1) -> None:
        """Reads until `what` was printed that many times."""
        deadline = time.monotonic() + 60
        while self.seen.count(what) < times:
            assert time.monotonic() < deadline, f"{what!r} not seen {times} times within 60 s: {self.seen!r}"
            assert self.read(), f"ended before {what!r} was seen {times} times: {self.seen!r}"

    def read(self) -> bool:
        """Reads available output; returns False at the end."""
        if not select.select([self._ours], [], [], 0.1)[0]:
            return True
        try:
            self.seen += os.read(self._ours, 65536).decode(errors="replace")
        except OSError:  # the process has ended
            return False
        return True

    def end(self, number: int) -> int:
        """Sends a signal, reads the remaining output, and returns the exit code."""
        self.process.send_signal(number)
        return self.rest()

    def rest(self) -> int:
        deadline = time.monotonic() + 60
        while self.read():
            assert time.monotonic() < deadline, f"not ended within 60 s: {self.seen!r}"
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def screens(self) -> tuple[str, str]:
        """Returns the text on the alternate screen and the text on the normal screen."""
        drawn = "".join(re.findall(f"{re.escape(ENTER)}(.*?){re.escape(LEAVE)}", self.seen, re.DOTALL))
        normal = re.sub(f"{re.escape(ENTER)}.*?{re.escape(LEAVE)}", "", self.seen, flags=re.DOTALL)
        return drawn, normal.replace("\r", "")


Open = Callable[..., Terminal]


@pytest.fixture
def terminal() -> Iterator[Open]:
    opened: list[Terminal] = []

    def make(*args: str, **environment: str) -> Terminal:
        opened.append(Terminal(*args, **environment))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_restored_and_shows_the_last_table(number: int, code: int, fleet: Any, terminal: Open) -> None:
    watched = terminal("rooms", "-w", "0.05")
    watched.until("kvctl rooms ls · every 0.05 s", times=3)
    assert watched.end(number) == code
    drawn, normal = watched.screens()
    assert watched.seen.count(ENTER) == watched.seen.count(LEAVE) == 1
    assert watched.seen.index("\x1b[?25l") < watched.seen.index("\x1b[?25h") < watched.seen.index(LEAVE)
    assert watched.seen.index("\x1b[?7l") < watched.seen.index("\x1b[?7h") < watched.seen.index(LEAVE)
    assert drawn.count("AGENT") >= 3
    assert normal.count("AGENT") == 1
    assert normal.startswith("kvctl rooms ls · every 0.05 s")
    assert "Traceback" not in watched.seen


def test_the_scrollback_is_not_erased(fleet: Any, terminal: Open) -> None:
    watched = terminal("rooms", "-w", "0.05")
    watched.until("kvctl rooms ls", times=3)
    watched.end(signal.SIGINT)
    assert "\x1b[3J" not in watched.seen
    assert "\x1b[2J" not in watched.seen


def test_a_recording_ends_by_itself(fleet: Any, terminal: Open, kvctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "fleet.kvrec"
    assert kvctl("record", str(file), "--for", "0.2s", "--every", "0.05s").code == 0
    watched = terminal("rooms", "--from", str(file), "-w", "0.05")
    assert watched.rest() == 0
    drawn, normal = watched.screens()
    assert drawn.count("AGENT") >= 2
    assert normal.count("AGENT") == 1


def test_a_stopped_process_shows_the_normal_screen(fleet: Any, terminal: Open) -> None:
    watched = terminal("rooms", "-w", "0.05")
    watched.until("kvctl rooms ls", times=2)
    watched.process.send_signal(signal.SIGTSTP)
    watched.until(LEAVE)
    deadline = time.monotonic() + 60
    while watched.seen.count(ENTER) < 2:  # a SIGCONT before the process has stopped is lost
        assert time.monotonic() < deadline, f"it did not go on: {watched.seen!r}"
        watched.process.send_signal(signal.SIGCONT)
        assert watched.read()
    watched.seen = watched.seen[watched.seen.rindex(ENTER) :]
    watched.until("kvctl rooms ls", times=3)
    assert watched.end(signal.SIGINT) == 130
    assert watched.seen.count(LEAVE) == 1


def test_a_drawing_fits_the_terminal(start: Any, terminal: Open, canned: ModuleType) -> None:
    rows = [canned.room_row("decode-0", str(room)) for room in range(100)]
    start("decode-0", {"rooms": lambda _: rows})
    watched = terminal("rooms", "-w", "0.05", "-o", "wide")
    watched.until("kvctl rooms ls", times=2)
    watched.end(signal.SIGINT)
    drawn, normal = watched.screens()
    first = drawn.split("\x1b[H")[1]
    assert first.count("\n") == ROWS - 1
    assert "... 80 more lines: use --filter, or a taller terminal" in first
    assert "more lines" not in normal
    assert normal.count("decode-0") == 100


def test_messages_stand_below_the_table_and_stay(start: Any, terminal: Open) -> None:
    start("decode-0")
    start("newer", protocol=[2, 3])
    watched = terminal("rooms", "-w", "0.05")
    watched.until("kvctl: newer: serves admin protocol 2 to 3", times=3)
    assert watched.end(signal.SIGINT) == 130
    drawn, normal = watched.screens()
    first = drawn.split("\x1b[H")[1]
    assert first.index("decode-0") < first.index("kvctl: newer: serves")
    assert normal.count("kvctl: newer: serves") == 1


@pytest.mark.parametrize("args", [("-o", "json"), ("-o", "csv")])
def test_formats_for_programs_are_not_drawn(args: tuple[str, ...], fleet: Any, terminal: Open) -> None:
    watched = terminal("rooms", "-w", "0.05", *args)
    watched.until("decode-0", times=3)
    watched.end(signal.SIGINT)
    assert "\x1b" not in watched.seen


def test_a_dumb_terminal_gets_one_table_after_the_other(fleet: Any, terminal: Open) -> None:
    watched = terminal("rooms", "-w", "0.05", TERM="dumb")
    watched.until("kvctl rooms ls", times=2)
    watched.end(signal.SIGINT)
    assert "\x1b" not in watched.seen


@pytest.mark.parametrize("output", [(), ("-o", "table")])
def test_a_pipe_gets_no_control_sequence(output: tuple[str, ...], fleet: Any) -> None:
    command = [sys.executable, "-m", "kvctl", "rooms", "-w", "0.05", *output]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "KVCTL_TIMEOUT": "30s"}) as process:
        assert process.stdout is not None
        seen = b"".join(process.stdout.readline() for _ in range(20))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
    assert b"Transferring" in seen
    assert b"\x1b" not in seen
