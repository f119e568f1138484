"""The textual app of `kvctl top`: navigation between panels, and an action for each key."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import ContentSwitcher

from kvctl.client.calls import Call
from kvctl.render.sanitize import printable, printable_lines
from kvctl.render.selection import ExpressionError
from kvctl.render.view import Row
from kvctl.tui import export, frame, keys
from kvctl.tui.dialogs import Choice, Confirm, Help, Prompt
from kvctl.tui.feed import ActionCalls, Feed, Question, Reading
from kvctl.tui.palette import PALETTES, theme_of
from kvctl.tui.panels.events import EventsPanel
from kvctl.tui.panels.layers import LayersPanel
from kvctl.tui.panels.overview import OverviewPanel
from kvctl.tui.panels.panel import Panel
from kvctl.tui.panels.peers import PeersPanel
from kvctl.tui.panels.record import RecordPanel
from kvctl.tui.panels.room import RoomPanel
from kvctl.tui.panels.rooms import FailedPanel, HistoryPanel, RoomsPanel
from kvctl.tui.panels.staging import StagingPanel
from kvctl.tui.store import Store
from kvctl.tui.table_specs import VIEW_OF, TableQuery
from kvctl.tui.widgets import Bar, Table
from kvctl_agent.contract.commands import COMMANDS_BY_NAME

_PANELS: dict[str, type[Panel]] = {
    "overview": OverviewPanel,
    "rooms": RoomsPanel,
    "staging": StagingPanel,
    "layers": LayersPanel,
    "peers": PeersPanel,
    "events": EventsPanel,
    "failed": FailedPanel,
    "history": HistoryPanel,
    "room": RoomPanel,
    "record": RecordPanel,
}
_ABORT_REASON = "aborted by an operator in kvctl top"


class ReadingArrived(Message):
    """Message from the feed's thread: a new reading has arrived."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading


class ActionDone(Message):
    """Message from the feed's thread: an action sent to agents has ended; `text` is its result in one line."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class TopApp(App[None]):
    """The textual app of `kvctl top`.

    Args:
        feed: source of readings; started and stopped by the app.
        mode: how the app runs, such as read-only or from a recording.
        view: name of the view that is shown first.
        clock: monotonic clock in nanoseconds, for the duration of a pause.
        query: filters and order of the first view.
    """

    TITLE = "kvctl top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: $background; color: $foreground; layout: vertical; }
    ModalScreen { background: transparent; }
    ContentSwitcher { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.key, key.action, key.name, show=False) for key in keys.KEYS if key.key != "enter"),
        Binding("ctrl+c", "exit(130)", show=False, priority=True),
    ]

    def __init__(
        self,
        feed: Feed,
        mode: frame.Mode,
        view: str = "overview",
        clock: Callable[[], int] = time.monotonic_ns,
        query: TableQuery | None = None,
    ) -> None:
        super().__init__()
        self.store = Store()
        self.feed = feed
        self._mode = mode
        self._clock = clock
        self._view = view
        self._opened: list[tuple[str, str]] = []  # panels opened on top of the view, with their titles
        self._queries: dict[str, TableQuery] = {view: query or TableQuery()}
        self._paused_at: int | None = None
        self._question: Question | None = None
        for palette in PALETTES:
            self.register_theme(theme_of(palette))
        self.theme = PALETTES[0].name

    def compose(self) -> ComposeResult:
        yield Bar(id="top", style="bar")
        yield Bar(id="tabs")
        yield Bar(id="banner")
        with ContentSwitcher(initial=self._view, id="panels"):
            for name, panel in _PANELS.items():
                yield panel(id=name)
        yield Bar(id="footer", style="bar")

    def on_mount(self) -> None:
        self.feed.start(self._deliver)
        self.set_interval(1, self._tick)
        self.call_after_refresh(self._enter_panel)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGHUP, signal.SIGTERM):
                loop.add_signal_handler(number, self.action_exit, 128 + number)

    def on_unmount(self) -> None:
        self.feed.stop()

    # ---- state of the screen ------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the view can be shown completely: health, and rates, which are differences between two readings.

        A recording is complete at its end, which it may have reached at once: then there are no rates.
        """
        store, position = self.store, self.store.position
        if position is None:
            return store.findings is not None and bool(store.trends.finished)
        at_end = position.index == position.count - 1
        return at_end and store.findings is not None and store.examined_at_ns == store.now_ns

    @property
    def panel_name(self) -> str:
        """Name of the panel on screen, a key of `_PANELS`."""
        return self._opened[-1][0] if self._opened else self._view

    @property
    def panel(self) -> Panel:
        return self.query_one(f"#{self.panel_name}", Panel)

    @property
    def table_query(self) -> TableQuery:
        """Filters and order of the panel on screen."""
        return self._queries.get(self.panel_name, TableQuery())

    @property
    def writes(self) -> bool:
        """Whether keys that change something in the fleet are available."""
        return not self._mode.readonly and not self.feed.recorded

    @property
    def _has_widgets(self) -> bool:
        """Whether the widgets exist; False while the app exits, when messages may still arrive."""
        return bool(self.query("#footer"))

    def set_query(self, query: TableQuery) -> None:
        """Changes filters and order of the panel on screen."""
        self._queries[self.panel_name] = query
        self._show()

    # ---- readings and drawing -----------------------------------------------------------------------------------

    def _deliver(self, reading: Reading) -> None:
        """Passes a reading from the feed's thread to the app's thread."""
        self.post_message(ReadingArrived(reading))

    def _report(self, text: str) -> None:
        """Passes the result of an action from the feed's thread to the app's thread."""
        self.post_message(ActionDone(text))

    def on_reading_arrived(self, message: ReadingArrived) -> None:
        if not self._has_widgets:
            return
        # While paused, only readings for the panel on screen are shown: it may have been opened during the pause.
        if self._paused_at is None or message.reading.question.view == self.panel_name:
            self.store.take(message.reading)
            self._ask()
            self._show()
        self.feed.acknowledge()

    def on_action_done(self, message: ActionDone) -> None:
        self.notify(printable_lines(message.text), markup=False)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def on_table_moved(self) -> None:
        if self.panel_name in {"overview", "staging"}:  # their pictures depend on the row under the cursor
            self._show()

    def _tick(self) -> None:
        if self._paused_at is not None and self._has_widgets:
            self._show_frame()

    def _enter_panel(self) -> None:
        """Shows the current panel and requests its data."""
        if not self._has_widgets:
            return
        self.query_one("#panels", ContentSwitcher).current = self.panel_name
        self.panel.enter()
        self._question = None
        self._ask()
        self._show()

    def _ask(self) -> None:
        """Sends the panel's question (the calls for its data) to the feed if it has changed."""
        question = self.panel.question(self.store)
        if question != self._question:
            self._question = question
            self.feed.ask(question)

    def _show(self) -> None:
        size = self.query_one("#panels").size if self._has_widgets else None
        if not size:
            return
        panel = self.panel
        panel.size_changed(size.width, size.height)
        panel.render_store(self.store, self.table_query)
        self._show_frame()

    def _show_frame(self) -> None:
        mode = replace(self._mode, paused_ns=None if self._paused_at is None else self._clock() - self._paused_at)
        self.query_one("#top", Bar).show(frame.top(self.store, mode))
        self.query_one("#tabs", Bar).show(frame.tabs(self._view, [title for _, title in self._opened]))
        self.query_one("#banner", Bar).show(*frame.banner(self.store, mode))
        available = keys.available(self.panel_name, recorded=self.feed.recorded, writes=self.writes)
        names = [(key.label, key.name) for key in available if key.footer]
        self.query_one("#footer", Bar).show(frame.footer(names, self.size.width))

    # ---- navigation ---------------------------------------------------------------------------------------------

    def on_table_opened(self, message: Table.Opened) -> None:
        spec = message.table.spec
        if spec is None:
            return
        if self.panel.open_row(message.table, message.row):
            self._show()
            return
        room = spec.room(message.row)
        if room is not None:
            self.open_room(room)
        else:
            key = spec.key(message.row)
            title = " ".join(str(part) for part in key) if isinstance(key, tuple) else str(key)
            self._open_record(message.table, [message.row], title)

    def on_panel_filtered(self, message: Panel.Filtered) -> None:
        self.set_query(TableQuery(filters=message.filters))

    def on_peers_panel_pair_opened(self, message: PeersPanel.PairOpened) -> None:
        if message.rows:
            self._open_record(self.query_one("#peers-table", Table), message.rows, " → ".join(message.pair))
        else:
            self.notify(printable(f"no link between {' and '.join(message.pair)}"), markup=False)

    def open_room(self, room: str) -> None:
        """Opens the panel of the room with this number."""
        self.query_one("#room", RoomPanel).room = room
        self._open("room", f"room {room}")

    def _open_record(self, table: Table, rows: Sequence[Row], title: str) -> None:
        self.query_one("#record", RecordPanel).open(title, self.panel, table, rows)
        self._open("record", title)

    def _open(self, panel: str, title: str) -> None:
        self._opened = [each for each in self._opened if each[0] != panel]
        self._opened.append((panel, title))
        self._enter_panel()

    def action_view(self, name: str) -> None:
        self._view, self._opened = name, []
        self._enter_panel()

    def action_close(self) -> None:
        """Closes the panel opened last; if none is open, removes the filter and `faults only` of the view."""
        if self._opened:
            self._opened.pop()
            self._enter_panel()
        elif self.table_query.filters or self.table_query.faults_only:
            self.set_query(replace(self.table_query, filters="", faults_only=False))

    def action_exit(self, code: int) -> None:
        """Restores the terminal and exits with the given exit code."""
        self.exit(return_code=code)

    # ---- keys ---------------------------------------------------------------------------------------------------

    def action_pause(self) -> None:
        playing = self.store.position is not None and self.store.position.playing
        if self._paused_at is None and (self.store.position is None or playing):
            self._paused_at = self._clock()
        else:
            self._paused_at = None
        self.feed.pause(self._paused_at is not None)
        self._show_frame()

    def action_seek(self, step: int) -> None:
        if not self.feed.recorded:
            self.notify("seeking needs a recording: kvctl top --from FILE")
            return
        self._paused_at = None
        self.feed.seek(step)

    def action_filter(self) -> None:
        table = self.panel.main if self.panel.MAIN_TABLE else None
        if table is None or table.spec is None:
            return
        view = VIEW_OF.get(self.panel_name, table.spec.view)

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
                self.set_query(replace(self.table_query, filters=text.strip()))

        hint = "text, or age>5s & state=Failed; a number opens that room"
        self.push_screen(Prompt(f"filter {table.label}", self.table_query.filters, check, hint), done)

    def action_sort(self) -> None:
        table = self.panel.table
        if table is None or table.spec is None:
            return
        view = VIEW_OF.get(self.panel_name, table.spec.view) if table is self.panel.main else table.spec.view

        def done(column: str | None) -> None:
            if column is not None:
                self.set_query(self.table_query.sorted_by(view, column))

        current = (self.table_query.order or next(iter(view.sort), "")).removeprefix("-")
        options = [(column.name, column.name.replace("_", " ")) for column in view.columns]
        self.push_screen(Choice("sort by; the same again reverses", options, current), done)

    def action_faults(self) -> None:
        self.set_query(replace(self.table_query, faults_only=not self.table_query.faults_only))

    def action_copy(self) -> None:
        text, description = self.panel.clipboard()
        if not text:
            self.notify("no row to copy here")
            return
        self.copy_to_clipboard(text)
        self.notify(f"copied {description}", markup=False)

    def action_export(self) -> None:
        table = self.panel.table
        if table is None or table.listing is None or not table.listing.rows:
            self.notify("no rows to export here")
            return
        listing, at_ns = table.listing, self.store.now_ns
        count = f"{len(listing.rows):,} rows"

        def done(name: str | None) -> None:
            if name is None:
                return
            try:
                path = export.write(name, listing, at_ns)
            except OSError as error:
                self.notify(f"cannot write {name}: {error.strerror}", severity="error", markup=False)
            else:
                self.notify(f"{count} in {path}", markup=False)

        name = export.default_name(listing, at_ns)
        prompt = Prompt(f"export {count} of {table.label} to", name, export.check_name, ".tsv, .csv or .json", True)
        self.push_screen(prompt, done)

    def action_theme(self) -> None:
        names = [palette.name for palette in PALETTES]
        self.theme = names[(names.index(self.theme) + 1) % len(names)]
        self.notify(f"theme {self.theme}", timeout=2)

    def action_help(self) -> None:
        recorded, writes = self.feed.recorded, self.writes
        self.push_screen(Help(lambda width: keys.help_page(width, recorded=recorded, writes=writes)))

    def action_abort(self) -> None:
        """Aborts the room under the cursor, after a confirmation, on every agent that reports it."""
        room = self.query_one("#room", RoomPanel).room if self.panel_name == "room" else None
        table = self.panel.table
        if room is None and table is not None and table.row is not None and table.spec is not None:
            room = table.spec.room(table.row)
        if room is None or not self.writes or self.panel_name not in {"rooms", "room"}:
            return
        agents = sorted(
            {row["agent"] for row in (*self.store.rows("rooms"), *self.store.rows("room")) if row["room"] == room}
        )
        if not agents:
            self.notify(printable(f"no agent that answers knows room {room}"), severity="warning", markup=False)
            return
        call = Call("abort", {"room": room, "reason": _ABORT_REASON})
        question = f"Abort room {room} on {', '.join(agents)}?\nIts request fails; other requests are not affected."
        self._confirm(question, [(agent, call) for agent in agents])

    def action_release(self) -> None:
        """Releases the ring allocation under the cursor, after a confirmation."""
        row = self.query_one("#staging-allocations", Table).row
        if not self.writes or self.panel_name != "staging" or row is None:
            return
        agent = str(row["agent"])
        question = (
            f"Release allocation {row['serial']} of room {row['room']} ({row['state']}) in the ring of {agent}?\n"
            f"Its writer {row['writer']} must not write any more."
        )
        self._confirm(question, [(agent, Call("release", {"serial": row["serial"]}))])

    def _confirm(self, question: str, calls: ActionCalls) -> None:
        """Asks for a confirmation and then sends calls to agents; only warns if an agent does not permit its call."""
        for agent, call in calls:
            required = COMMANDS_BY_NAME[call.command].level
            if not self.store.may(agent, required):
                level = self.store.agents[agent].level
                refusal = f"{agent} permits us {level} only, {call.command} needs {required.label}"
                self.notify(printable(refusal), severity="warning", markup=False)
                return

        def done(confirmed: bool | None) -> None:
            if confirmed:
                self.feed.act(calls, self._report)

        self.push_screen(Confirm(printable_lines(question)), done)
