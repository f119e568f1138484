"""`kvctl top` as a textual app: the keys that act on what is looked at."""

from __future__ import annotations

from dataclasses import replace

from kvctl.render.sanitize import printable, printable_lines
from kvctl.render.selection import ExpressionError
from kvctl.tui import actions, export, keys
from kvctl.tui.browser import Browser
from kvctl.tui.dialogs import Choice, Confirm, Help, Prompt
from kvctl.tui.palette import PALETTES
from kvctl.tui.panels.room import RoomPanel
from kvctl.tui.table_specs import TableQuery
from kvctl.tui.widgets.table import Table


class TopApp(Browser):
    """The browser with its keys for filter, order, copies, files and orders to the fleet."""

    def action_filter(self) -> None:
        table = self.panel.main
        if table is None or table.sheet is None:
            return
        view = table.sheet.view

        def check(text: str) -> str:
            if text.strip().isdecimal():
                return ""
            try:
                TableQuery(text).selection(view)
            except ExpressionError as error:
                return str(error)
            return ""

        def done(text: str | None) -> None:
            if text is not None and text.strip().isdecimal():
                self.open_room(str(int(text)))
            elif text is not None:
                self.wish_for(replace(self.wish, filters=text.strip()))

        hint = "text, or age>5s & state=Failed; a number opens that room"
        self.push_screen(Prompt(f"filter {table.name_of}", self.wish.filters, check, hint), done)

    def action_sort(self) -> None:
        table = self.panel.table
        if table is None or table.sheet is None:
            return
        view = table.sheet.view

        def done(column: str | None) -> None:
            if column is not None:
                self.wish_for(self.wish.sorted_by(view, column))

        current = (self.wish.order or next(iter(view.sort), "")).removeprefix("-")
        options = [(column.name, column.name.replace("_", " ")) for column in view.columns]
        self.push_screen(Choice("sort by; the same again turns it", options, current), done)

    def action_faults(self) -> None:
        self.wish_for(replace(self.wish, faults_only=not self.wish.faults_only))

    def action_copy(self) -> None:
        text, what = self.panel.copied()
        if not text:
            self.notify("no row to copy here")
            return
        self.copy_to_clipboard(text)
        self.notify(f"copied {what}", markup=False)

    def action_export(self) -> None:
        table = self.panel.table
        if table is None or table.listing is None or not table.listing.rows:
            self.notify("no rows to export here")
            return
        rows = table.listing
        at_ns = self.store.now_ns

        def done(name: str | None) -> None:
            if name is None:
                return
            try:
                path = export.write(name, rows, at_ns)
            except OSError as error:
                self.notify(f"cannot write {name}: {error.strerror}", severity="error", markup=False)
            else:
                self.notify(f"{len(rows.rows):,} rows in {path}", markup=False)

        title = f"export {len(rows.rows):,} rows of {table.name_of} to"
        self.push_screen(Prompt(title, export.default_name(rows, at_ns), export.wrong, ".tsv, .csv or .json"), done)

    def action_theme(self) -> None:
        names = [palette.name for palette in PALETTES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]
        self.notify(f"theme {self.theme}", timeout=2)

    def action_help(self) -> None:
        recorded, writes = self.feed.recorded, self.writes
        self.push_screen(Help(lambda width: keys.help_page(width, recorded=recorded, writes=writes)))

    def action_abort(self) -> None:
        room = self.query_one("#room", RoomPanel).room if self.name_on_screen == "room" else None
        table = self.panel.table
        if room is None and table is not None and table.row is not None and table.sheet is not None:
            room = table.sheet.room(table.row)
        if room is not None and self.writes and self.name_on_screen in {"rooms", "room"}:
            self._order(actions.abort(self.store, room))

    def action_release(self) -> None:
        table = self.query_one("#staging-allocations", Table)
        if self.writes and self.name_on_screen == "staging" and table.row is not None:
            self._order(actions.release(self.store, table.row))

    def _order(self, order: actions.Action | str) -> None:
        if isinstance(order, str):
            self.notify(printable(order), severity="warning", markup=False)
            return
        calls = order.calls

        def done(sure: bool | None) -> None:
            if sure:
                self.feed.act(calls, self.told)

        self.push_screen(Confirm(printable_lines(order.question)), done)
