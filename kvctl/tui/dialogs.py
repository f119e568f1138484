"""Dialogs shown over a panel: prompt and help page."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from kvctl.tui.widgets import Draw, Picture


class Prompt(ModalScreen[str | None]):
    """Input line at the bottom of the screen; Enter returns the text if it is valid, Esc returns None.

    Args:
        check: returns an error message for an invalid text; "" if the text is valid.
        proposed: whether the initial text is a proposal, which the first typed letter replaces; otherwise the user
            edits it.
    """

    DEFAULT_CSS = """
    Prompt { align: left bottom; background: transparent; }
    Prompt Vertical { height: auto; background: $panel; padding: 0 1; }
    Prompt Static { height: auto; color: $text-muted; }
    Prompt Static.wrong { color: $error; }
    Prompt Input, Prompt Input:focus { border: none; height: 1; padding: 0; background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "cancel", show=False, priority=True)]

    def __init__(self, title: str, value: str, check: Callable[[str], str], hint: str, proposed: bool = False) -> None:
        super().__init__()
        self._proposed = proposed
        self._label = f"{title}   {hint}"
        self._value = value
        self._check = check

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._label, markup=False)
            yield Input(self._value, select_on_focus=self._proposed)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._validate(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if self._validate(event.value):
            self.dismiss(event.value)

    def action_cancel(self) -> None:
        self.dismiss(None)

    def _validate(self, text: str) -> bool:
        """Shows the error of a text, or the hint; returns whether the text is valid."""
        error = self._check(text)
        line = self.query_one(Static)
        line.set_class(bool(error), "wrong")
        line.update(error or self._label)
        return not error


class Help(ModalScreen[None]):
    """Help page shown over the panels; Esc, `q`, `?`, Enter, space and Ctrl-C close it."""

    DEFAULT_CSS = """
    Help { align: center middle; background: transparent; }
    Help Picture { width: 96; max-width: 100%; max-height: 95%; background: $panel; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c,q,question_mark,enter,space", "cancel", show=False)]

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    def compose(self) -> ComposeResult:
        yield Picture()

    def on_mount(self) -> None:
        picture = self.query_one(Picture)
        picture.background_style = "bar"
        picture.show(self._draw, ([("keys", "")], [("Esc closes", "dim")]))
        picture.focus()

    def action_cancel(self) -> None:
        self.dismiss(None)
