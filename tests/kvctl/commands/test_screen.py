"""`-w` on a pseudo terminal: tables on the alternate screen, which is left at the end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.terminal import ROWS

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def screens(text: str) -> tuple[str, str]:
    """Returns the text on the alternate screen and the text on the normal screen."""
    drawn = "".join(re.findall(f"{re.escape(ENTER)}(.*?){re.escape(LEAVE)}", text, re.DOTALL))
    normal = re.sub(f"{re.escape(ENTER)}.*?{re.escape(LEAVE)}", "", text, flags=re.DOTALL)
    return drawn, normal.replace("\r", "")


pytestmark = pytest.mark.usefixtures("patience")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_restored_and_shows_the_last_table(
    number: int, code: int, fleet: Any, on_terminal: Any
) -> None:
    watched = on_terminal("rooms", "-w", "0.05")
    watched.until("kvctl rooms ls · every 0.05 s", times=3)
    assert watched.end(number) == code
    drawn, normal = screens(watched.seen)
    assert watched.seen.count(ENTER) == watched.seen.count(LEAVE) == 1
    assert watched.seen.index("\x1b[?25l") < watched.seen.index("\x1b[?25h") < watched.seen.index(LEAVE)
    assert watched.seen.index("\x1b[?7l") < watched.seen.index("\x1b[?7h") < watched.seen.index(LEAVE)
    assert drawn.count("AGENT") >= 3
    assert normal.count("AGENT") == 1
    assert normal.startswith("kvctl rooms ls · every 0.05 s")
    assert "Traceback" not in watched.seen
    assert "\x1b[2J" not in watched.seen, "the scrollback is kept"
    assert "\x1b[3J" not in watched.seen


def test_a_recording_ends_by_itself(fleet: Any, on_terminal: Any, kvctl: Any, tmp_path: Path) -> None:
    file = tmp_path / "fleet.kvrec"
    assert kvctl("record", str(file), "--for", "0.2s", "--every", "0.05s").code == 0
    watched = on_terminal("rooms", "--from", str(file), "-w", "0.05")
    assert watched.rest() == 0
    drawn, normal = screens(watched.seen)
    assert drawn.count("AGENT") >= 2
    assert normal.count("AGENT") == 1


def test_a_stopped_process_shows_the_normal_screen(fleet: Any, on_terminal: Any) -> None:
    watched = on_terminal("rooms", "-w", "0.05")
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


def test_a_drawing_fits_the_terminal(start: Any, on_terminal: Any, canned: ModuleType) -> None:
    rows = [canned.room_row("decode-0", str(room)) for room in range(100)]
    start("decode-0", {"rooms": lambda _: rows})
    watched = on_terminal("rooms", "-w", "0.05", "-o", "wide")
    watched.until("kvctl rooms ls", times=2)
    watched.end(signal.SIGINT)
    drawn, normal = screens(watched.seen)
    first = drawn.split("\x1b[H")[1]
    assert first.count("\n") == ROWS - 1
    assert "... 80 more lines: use --filter, or a taller terminal" in first
    assert "more lines" not in normal
    assert normal.count("decode-0") == 100


def test_messages_stand_below_the_table_and_stay(start: Any, on_terminal: Any) -> None:
    start("decode-0")
    start("newer", protocol=[2, 3])
    watched = on_terminal("rooms", "-w", "0.05")
    watched.until("kvctl: newer: serves admin protocol 2 to 3", times=3)
    assert watched.end(signal.SIGINT) == 130
    drawn, normal = screens(watched.seen)
    first = drawn.split("\x1b[H")[1]
    assert first.index("decode-0") < first.index("kvctl: newer: serves")
    assert normal.count("kvctl: newer: serves") == 1


@pytest.mark.parametrize(
    ("args", "term", "shown"),
    [(("-o", "json"), "xterm", "decode-0"), (("-o", "csv"), "xterm", "decode-0"), ((), "dumb", "kvctl rooms ls")],
)
def test_neither_programs_nor_dumb_terminals_get_a_drawing(
    args: tuple[str, ...], term: str, shown: str, fleet: Any, on_terminal: Any
) -> None:
    watched = on_terminal("rooms", "-w", "0.05", *args, environment={"TERM": term})
    watched.until(shown, times=2)
    watched.end(signal.SIGINT)
    assert "\x1b" not in watched.seen


@pytest.mark.parametrize("output", [(), ("-o", "table")])
def test_a_pipe_gets_no_control_sequence(output: tuple[str, ...], fleet: Any) -> None:
    command = [sys.executable, "-m", "kvctl", "rooms", "-w", "0.05", *output]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        seen = b"".join(process.stdout.readline() for _ in range(20))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
    assert b"Transferring" in seen
    assert b"\x1b" not in seen
