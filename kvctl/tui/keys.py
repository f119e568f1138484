"""Table of the keys of `kvctl top`, from which key bindings, footer and help page are built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.render.bars import legend as stage_legend
from kvctl.render.report import Line
from kvctl.render.staging import allocation_legend
from kvctl.tui import VIEWS
from kvctl.tui.drawing import wrapped


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its action.

    Attributes:
        key: textual's name of the key.
        action: method of `TopApp` that the key calls, without the prefix `action_`, with its argument.
        name: name of the action for the footer, one or two words.
        recorded: True for recordings only, False for live fleets only, None for both.
    """

    key: str
    action: str
    label: str
    name: str
    help: str
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
    Key("left_square_bracket", "seek(-1)", "[", "earlier", "previous snapshot of a recording", recorded=True),
    Key("right_square_bracket", "seek(1)", "]", "later", "next snapshot of a recording", recorded=True),
    Key("space", "pause", "Space", "pause", "pause and resume updates"),
    Key("s", "sort", "s", "sort", "choose the column to sort by; the same again reverses"),
    Key("y", "copy", "y", "copy", "copy the row to the clipboard, as TSV with its header"),
    Key("question_mark", "help", "?", "keys", "this page", footer=False),
    Key("q", "quit", "q", "quit", "quit", footer=False),
)
_LABEL_WIDTH = 10
_CURSOR_KEYS: tuple[tuple[str, str], ...] = (
    ("↑ ↓ j k", "move the cursor; PgUp PgDn g G by pages and to the ends"),
    ("Tab", "the next table or picture of the view"),
)


def available(*, recorded: bool) -> list[Key]:
    """Returns the keys that are available for a recording, or for a live fleet."""
    return [key for key in KEYS if key.recorded in {None, recorded}]


def help_page(width: int, *, recorded: bool) -> Sequence[Line]:
    """Draws the help page in `width` cells: keys with descriptions, and legends of the glyphs."""
    shown = available(recorded=recorded)
    numbers = [key for key in shown if key.label.isdigit()]
    lines: list[Line] = [_line(f"1 - {len(numbers)}", ", ".join(key.name for key in numbers))]
    lines += [_line(*each) for each in _CURSOR_KEYS]
    lines += [_line(key.label, key.help) for key in shown if key not in numbers]
    legends: list[Line] = [
        [("stages    ", "bold"), *stage_legend()],
        [("ring      ", "bold"), *allocation_legend()],
        [("rows      ", "bold"), ("○", ""), (" the agent is silent: dim, its last data", "dim")],
    ]
    return [*lines, [], *(line for each in legends for line in wrapped(each, width, _LABEL_WIDTH))]


def _line(label: str, text: str) -> Line:
    return [(f"{label:<{_LABEL_WIDTH}}", "bold accent"), (text, "")]
