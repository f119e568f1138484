"""View 4: where the time goes, by layer group and stage, and how much of the way compute hid."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Container

from kvctl.client.calls import Call
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.pictures.heat import heat_map
from kvctl.tui.readings import Question
from kvctl.tui.sheets import LAYERS_SHEET, Wish, listing
from kvctl.tui.store import Store
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table
from kvctl.views.waterfall import draw

_WIDE = 170


class LayersPanel(Panel):
    """Waterfall, heat map and the numbers of both; a filter holds for all three."""

    DEFAULT_CSS = """
    LayersPanel #layers-pictures { height: auto; max-height: 66%; layout: vertical; }
    LayersPanel #layers-waterfall { max-height: 50%; }
    LayersPanel #layers-heat { max-height: 50%; }
    LayersPanel .wide { layout: horizontal; }
    LayersPanel .wide Picture { width: 1fr; max-height: 100%; }
    """

    def compose(self) -> ComposeResult:
        with Container(id="layers-pictures"):
            yield Picture(id="layers-waterfall")
            yield Picture(id="layers-heat")
        yield Table("layer groups", id="layers-table")

    @property
    def main(self) -> Table:
        return self.query_one("#layers-table", Table)

    def question(self, store: Store) -> Question:
        return Question("layers", (STATUS, Call("layers")))

    def size_changed(self, width: int, height: int) -> None:
        self.query_one("#layers-pictures").set_class(width >= _WIDE, "wide")

    def render_store(self, store: Store, wish: Wish) -> None:
        rows = store.rows("layers")
        show(self.main, LAYERS_SHEET, rows, store, wish)
        shown = listing(LAYERS_SHEET, rows, wish).rows
        waterfall, heat = self.query_one("#layers-waterfall", Picture), self.query_one("#layers-heat", Picture)
        waterfall.show(lambda width: draw(shown, width) if shown else [], ([("waterfall of medians", "")], []))
        heat.show(
            lambda width: heat_map(shown, width), ([("layer groups by stage", "")], [("median of agents", "dim")])
        )
