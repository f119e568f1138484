"""View 1: health findings, summary and trends of the fleet, and agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from textual.app import ComposeResult

from kvctl.health.finding import Finding
from kvctl.render import findings, units
from kvctl.render.findings import HEALTH
from kvctl.render.groups import FOLD_ABOVE, placed
from kvctl.render.groups import outline as outline_of_groups
from kvctl.render.report import Line, Span
from kvctl.render.status import GROUPS, STATUS, outline, runs
from kvctl.render.view import Row
from kvctl.tui.drawing import beside, chart, inline_chart, wrapped
from kvctl.tui.feed import Question
from kvctl.tui.listings import TableQuery
from kvctl.tui.panels.panel import STATUS_CALL, Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Picture, Table

# Minimum width for curves beside the summary instead of below it.
_WIDE = 110
_GAP = 3
_LABEL_WIDTH = 9
_TALL = 34
_SECOND_NS = 1_000_000_000


class OverviewPanel(Panel):
    """Health findings, summary and trends of the fleet, and the table of agents."""

    DEFAULT_CSS = """
    OverviewPanel #overview-health { height: auto; max-height: 30%; }
    """
    MAIN_TABLE = "overview-agents"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._height = 24
        self._unfolded: set[str] = set()
        self._members: frozenset[tuple[str, str | None]] = frozenset()
        self._instances: dict[str, str] = {}
        self._findings: Sequence[Finding] | None = None
        self._finding_rows: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        yield Table("health", id="overview-health")
        yield Picture(id="overview-remedy")
        yield Picture(id="overview-fleet")
        yield Table("agents", id="overview-agents")

    def question(self, store: Store) -> Question:
        return Question("overview", (STATUS_CALL,))

    def size_changed(self, width: int, height: int) -> None:
        self._height = height

    def render_store(self, store: Store, query: TableQuery) -> None:
        statuses = store.statuses()
        self._health(store)
        fresh = [row for row in statuses if store.stale_ns(row["name"]) is None or not runs(row)]
        fleet = self.query_one("#overview-fleet", Picture)
        fleet.show(lambda width: self._fleet(store, fresh, width), ([("fleet", "")], []))
        folded = len(store.agents) > FOLD_ABOVE and query == TableQuery()
        self.main.label = "instances" if folded else "agents"
        if not folded:
            show(self.main, STATUS, statuses, store, query)
        else:
            lines = outline_of_groups(self._placed(_with_silent(store, statuses)), self._unfolded)
            show(self.main, GROUPS, lines, store, query, "Enter unfolds, / host=… lists the agents of a host")

    def _placed(self, rows: Sequence[dict[str, Any]]) -> Sequence[Row]:
        """Adds the names of their instances to the rows; they change only when agents come or go."""
        members = frozenset((row["name"], row.get("incarnation")) for row in rows)
        if members != self._members:
            self._members = members
            self._instances = {row["name"]: row["instance"] for row in placed(rows) if "instance" in row}
        for row in rows:
            if "rank" in row:
                row["instance"] = self._instances[row["name"]]
        return rows

    def open_row(self, table: Table, row: Row) -> bool:
        """Folds or unfolds a group; lists only the agent if the row is that of an agent below its group."""
        if table.view is not GROUPS:
            return False
        if "fold" in row:
            self._unfolded ^= {row["fold"]}
        else:
            self.post_message(self.Filtered(f"agent={row['name']}"))
        return True

    def _health(self, store: Store) -> None:
        table = self.query_one("#overview-health", Table)
        if store.findings is not self._findings:  # which are the same for many readings
            self._findings = store.findings
            self._finding_rows = [findings.row(finding) for finding in store.findings or ()]
        rows = self._finding_rows
        empty: Line
        if store.survey is not None and not store.answering:
            rows, empty = [], [no_agents(store)]
        else:
            empty = [("examining …", "dim")] if store.findings is None else [findings.headline(rows, store.complete)]
        age_ns = (store.now_ns - store.examined_at_ns) // _SECOND_NS * _SECOND_NS
        old = store.findings is not None and store.answering and age_ns > _SECOND_NS
        note = f"as of {units.duration(age_ns)} ago" if old else ""
        show(table, HEALTH, rows, store, TableQuery(), note, empty)
        table.fit_height()
        finding = table.row
        tall = self._height >= _TALL
        self.query_one("#overview-remedy", Picture).show(lambda width: _remedy(finding, width, tall) if finding else [])

    def _fleet(self, store: Store, statuses: Sequence[Row], width: int) -> list[Line]:
        summary = outline(statuses, store.summary) if statuses else [[no_agents(store)]]
        trends, tall = store.trends, self._height >= _TALL
        if width < _WIDE:
            curves = [
                inline_chart("GB/s", [*trends.throughput], units.three_digits, width, "green"),
                inline_chart("rooms/s", [*trends.finished], units.three_digits, width, "blue"),
                inline_chart("p99", [*trends.p99], units.duration, width, "magenta"),
            ]
            return [*_wrap(summary, width, tall), *curves]
        height = 3 if tall else 1
        left = min(width // 2, 100)
        half = (width - left - 2 * _GAP) // 2
        first = chart("GB/s", [*trends.throughput], units.three_digits, half, height, "green")
        second = chart("p99", [*trends.p99], units.duration, half, height, "magenta")
        right = beside(first, second, half)
        more = beside(
            chart("rooms/s", [*trends.finished], units.three_digits, half, height, "blue"),
            chart("p50", [*trends.p50], units.duration, half, height, "magenta"),
            half,
        )
        return beside(_wrap(summary, left, tall), [*right, *more] if tall else right, left, _GAP)


def _with_silent(store: Store, statuses: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows to group: of agents that do not answer at present only name, host and since when."""
    rows: list[dict[str, Any]] = []
    for row in statuses:
        stale_ns = store.stale_ns(row["name"])
        if stale_ns is None or not runs(row):
            rows.append(row)
        else:
            since = f"{units.duration(stale_ns // _SECOND_NS * _SECOND_NS)} ago"
            rows.append({"name": row["name"], "host": row.get("host"), "health": [since]})
    for fault in store.never_heard:
        host = store.survey.host_of(fault.agent) if store.survey else ""
        rows.append({"name": fault.agent, "host": host, "health": [fault.code]})
    return rows


def no_agents(store: Store) -> Span:
    """Returns the text shown instead of data: kvctl is still connecting, or no agent answers."""
    if store.survey is None and not store.problem:
        return ("connecting …", "dim")
    return ("no agent answers", "yellow")


def _remedy(finding: Row, width: int, tall: bool) -> list[Line]:
    """Draws the remedy of a finding, and above it the cause if the screen is `tall`."""
    remedy = findings.labelled("remedy", finding["remedy"], width)
    return [*findings.labelled("cause", finding["cause"], width), *remedy] if tall else remedy


def _wrap(lines: Sequence[Line], width: int, tall: bool) -> list[Line]:
    return [piece for line in lines for piece in wrapped(line, width, _LABEL_WIDTH, inside=tall)]
