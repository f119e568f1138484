"""Table of the keys of `kvctl top`, from which key bindings, footer and help page are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.render.bars import legend as stage_legend
from kvctl.render.peers import pair_legend
from kvctl.render.report import Line
from kvctl.render.staging import allocation_legend
from kvctl.tui.drawing import wrapped
from kvctl.tui.frame import VIEWS


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its action.

    Attributes:
        key: textual's name of the key.
        action: method of `TopApp` that the key calls, without the prefix `action_`, with its argument.
        label: name of the key as displayed.
        name: name of the action for the footer, one or two words.
        help: description for the help page.
        views: panels in which the key is available; empty for all.
        writes: whether the key changes something in the fleet.
        recorded: True for recordings only, False for live fleets only, None for both.
        footer: whether the footer shows the key.
    """

    key: str
    action: str
    label: str
    name: str
    help: str
    views: frozenset[str] = frozenset()
    writes: bool = False
    recorded: bool | None = None
    footer: bool = True


KEYS: tuple[Key, ...] = (
    *(
        Key(str(number), f"view('{name}')", str(number), name, name, footer=False)
        for number, name in enumerate(VIEWS, 1)
    ),
    Key("slash", "filter", "/", "filter", "a text, or age>5s & state=Failed; a number opens that room"),
    Key("enter", "open", "Enter", "open", "open the room, pair or row under the cursor"),
    Key("escape", "close", "Esc", "back", "close what Enter opened; then remove the filter", footer=False),
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
        "release the ring allocation under the cursor; asks first",
        frozenset({"staging"}),
        writes=True,
    ),
    Key("left_square_bracket", "seek(-1)", "[", "earlier", "previous snapshot of a recording", recorded=True),
    Key("right_square_bracket", "seek(1)", "]", "later", "next snapshot of a recording", recorded=True),
    Key("space", "pause", "Space", "pause", "pause and resume updates"),
    Key("s", "sort", "s", "sort", "choose the column to sort by; the same again reverses"),
    Key("e", "faults", "e", "faults", "show only rows with a fault, or all rows"),
    Key("y", "copy", "y", "copy", "copy the row to the clipboard, as TSV with its header"),
    Key("E", "export", "E", "export", "write the table to a file: .tsv, .csv or .json"),
    Key("t", "theme", "t", "theme", "dark, light, high contrast"),
    Key("question_mark", "help", "?", "keys", "this page", footer=False),
    Key("q", "quit", "q", "quit", "quit", footer=False),
)
_LABEL_WIDTH = 10
_CURSOR_KEYS: tuple[tuple[str, str], ...] = (
    ("↑ ↓ j k", "move the cursor; PgUp PgDn g G by pages and to the ends"),
    ("Tab", "the next table or picture of the view"),
)


def available(view: str, *, recorded: bool, writes: bool) -> list[Key]:
    """Returns the keys that are available in a panel.

    Args:
        view: name of the panel.
        recorded: whether a recording is shown.
        writes: whether keys that change something in the fleet are available.
    """
    return [
        key
        for key in KEYS
        if (not key.views or view in key.views) and (writes or not key.writes) and key.recorded in {None, recorded}
    ]


def help_page(width: int, *, recorded: bool, writes: bool) -> Sequence[Line]:
    """Draws the help page: keys with descriptions, and legends of the glyphs.

    Args:
        width: width in cells.
        recorded, writes: as for `available`.
    """
    shown = [key for key in KEYS if (writes or not key.writes) and key.recorded in {None, recorded}]
    numbers = [key for key in shown if key.label.isdigit()]
    lines: list[Line] = [_line(f"1 - {len(numbers)}", ", ".join(key.name for key in numbers))]
    lines += [_line(*each) for each in _CURSOR_KEYS]
    lines += [_line(key.label, key.help) for key in shown if key not in numbers]
    legends: list[Line] = [
        [("stages    ", "bold"), *stage_legend()],
        [("ring      ", "bold"), *allocation_legend()],
        [("peers     ", "bold"), *pair_legend()],
        [("rows      ", "bold"), ("○", ""), (" the agent is silent: dim, its last data", "dim")],
    ]
    return [*lines, [], *(line for each in legends for line in wrapped(each, width, _LABEL_WIDTH))]


def _line(label: str, text: str) -> Line:
    return [(f"{label:<{_LABEL_WIDTH}}", "bold accent"), (text, "")]
