"""Every key, once: the bindings, the footer and the help page are made of this table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.render.bars import legend as stages
from kvctl.render.report import Line
from kvctl.render.staging import allocation_legend
from kvctl.tui.pictures import matrix
from kvctl.tui.pictures.compose import wrapped
from kvctl.tui.pictures.frame import VIEWS


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        key: as textual calls it; label: as people do.
        views: where the footer shows it; empty for everywhere.
        writes: changes something in the fleet.
        recorded: True for recordings only, False for live fleets only, None for both.
    """

    key: str
    action: str
    label: str
    does: str
    help: str
    views: frozenset[str] = frozenset()
    writes: bool = False
    recorded: bool | None = None
    footer: bool = True


KEYS: tuple[Key, ...] = (
    *(
        Key(str(number), f"view('{name}')", str(number), name, f"{name}", footer=False)
        for number, name in enumerate(VIEWS, 1)
    ),
    Key(
        "slash",
        "filter",
        "/",
        "filter",
        "a text, or age>5s & state=Failed; a number opens that room",
    ),
    Key("enter", "open", "Enter", "open", "into the room, the pair or the row under the cursor"),
    Key("escape", "out", "Esc", "back", "out again; then all rows again", footer=False),
    Key(
        "a",
        "abort",
        "a",
        "abort room",
        "fail the room under the cursor on all its ranks; asks first",
        frozenset({"rooms", "room"}),
        writes=True,
    ),
    Key(
        "r",
        "release",
        "r",
        "release",
        "give up the allocation under the cursor; asks first",
        frozenset({"staging"}),
        writes=True,
    ),
    Key("left_square_bracket", "seek(-1)", "[", "earlier", "one moment back in a recording", recorded=True),
    Key("right_square_bracket", "seek(1)", "]", "later", "one moment on in a recording", recorded=True),
    Key("space", "pause", "Space", "pause", "hold what is on screen, and go on"),
    Key("s", "sort", "s", "sort", "choose the column to sort by; the same again turns the order"),
    Key("e", "faults", "e", "faults", "only rows with something wrong, and all again"),
    Key("y", "copy", "y", "copy", "the row to the clipboard, as a line of TSV under its header"),
    Key("E", "export", "E", "export", "the table to a file: .tsv, .csv or .json"),
    Key("t", "theme", "t", "theme", "dark, light, high contrast"),
    Key("question_mark", "help", "?", "keys", "this page", footer=False),
    Key("q", "quit", "q", "quit", "leave", footer=False),
)
_LABEL = 10
_MOVING: tuple[tuple[str, str], ...] = (
    ("↑ ↓ j k", "move; PgUp PgDn g G by pages and to the ends"),
    ("Tab", "the next table or picture of the view"),
)


def available(view: str, *, recorded: bool, writes: bool) -> list[Key]:
    """Keys that do something there."""
    return [
        key
        for key in KEYS
        if (not key.views or view in key.views) and (writes or not key.writes) and key.recorded in {None, recorded}
    ]


def help_page(width: int, *, recorded: bool, writes: bool) -> Sequence[Line]:
    """All keys with what they do, and the glyphs."""
    shown = [key for key in KEYS if (writes or not key.writes) and key.recorded in {None, recorded}]
    numbers = [key for key in shown if key.label.isdigit()]
    lines: list[Line] = [_line(f"1 - {len(numbers)}", ", ".join(key.does for key in numbers))]
    lines += [_line(*each) for each in _MOVING]
    lines += [_line(key.label, key.help) for key in shown if key not in numbers]
    glyphs: list[Line] = [
        [("stages    ", "bold"), *stages()],
        [("ring      ", "bold"), *allocation_legend()],
        [("peers     ", "bold"), *matrix.legend()],
        [("rows      ", "bold"), ("○", ""), (" its agent is silent: dim, what was last known", "dim")],
    ]
    return [*lines, [], *(line for each in glyphs for line in wrapped(each, width, _LABEL))]


def _line(label: str, text: str) -> Line:
    return [(f"{label:<{_LABEL}}", "bold accent"), (text, "")]
