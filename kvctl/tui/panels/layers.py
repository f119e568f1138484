"""View 4: where the time goes, by layer group and stage, and how much of the way compute hid."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.render.report import Line
from kvctl.render.waterfall import draw
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.pictures.heat import heat_map, over_agents
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import LAYERS_SHEET, TableQuery, listing
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table

_MEDIANS: Line = [("medians over the agents", "dim")]


class LayersPanel(Panel):
    """Waterfall, heat map and the numbers of both; a filter holds for all three."""

    DEFAULT_CSS = """
    LayersPanel #layers-waterfall { max-height: 36vh; }
    LayersPanel #layers-heat { max-height: 32vh; }
    """

    def compose(self) -> ComposeResult:
        yield Picture(id="layers-waterfall")
        yield Picture(id="layers-heat")
        yield Table("layer groups", id="layers-table")

    @property
    def main(self) -> Table:
        return self.query_one("#layers-table", Table)

    def question(self, store: Store) -> Question:
        return Question("layers", (STATUS, Call("layers")))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        rows = store.rows("layers")
        show(self.main, LAYERS_SHEET, rows, store, wish)
        shown = over_agents(listing(LAYERS_SHEET, rows, wish).rows)
        waterfall, heat = self.query_one("#layers-waterfall", Picture), self.query_one("#layers-heat", Picture)
        waterfall.show(lambda width: draw(shown, width) if shown else [], ([("waterfall", "")], _MEDIANS))
        heat.show(lambda width: heat_map(shown, width), ([("layer groups by stage", "")], _MEDIANS))
