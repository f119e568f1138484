"""`-w` on a pseudo terminal."""

from __future__ import annotations

import re
import signal
from types import ModuleType
from typing import Any

import pytest

from tests.support.terminal import ROWS

pytestmark = pytest.mark.usefixtures("patience")


def test_a_table_is_redrawn_in_place_and_stays(start: Any, on_terminal: Any) -> None:
    start("decode-0")
    start("newer", protocol=[2, 3])
    watched = on_terminal("rooms", "-w", "0.05")
    watched.until("kvctl: newer: serves admin protocol 2 to 3", times=3)
    assert watched.end(signal.SIGINT) == 130
    before, *drawn = watched.seen.split("\x1b[H")
    assert before.count("\n") == ROWS, "the screen before it is kept in the scrollback"
    assert all(each.count("\x1b[?7l") == each.count("\x1b[?7h") == 1 for each in drawn[:-1])
    assert drawn[0].index("kvctl rooms ls · every 0.05 s") < drawn[0].index("decode-0") < drawn[0].index("kvctl: newer")
    assert "Traceback" not in watched.seen
    assert not re.search(r"\x1b\[[23]J", watched.seen), "neither the screen nor the scrollback is erased"


def test_a_drawing_fits_the_terminal(start: Any, on_terminal: Any, canned: ModuleType) -> None:
    rows = [canned.room_row("decode-0", str(room)) for room in range(100)]
    start("decode-0", {"rooms": lambda _: rows})
    watched = on_terminal("rooms", "-w", "0.05", "-o", "wide")
    watched.until("kvctl rooms ls", times=2)
    watched.end(signal.SIGINT)
    first = watched.seen.split("\x1b[H")[1]
    assert first.count("\n") == ROWS - 4
    assert "... 84 more lines: use --filter, or a taller terminal" in first


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
