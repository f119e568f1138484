"""The frames of a report: sections, figures with captions, and legends that the browser lays out, so none overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.lab.bench.html.chart import marker
from kvctl.lab.bench.html.markup import Markup, joined, tag
from kvctl.lab.bench.html.series import Series


def section(title: str, lead: str, *children: Markup | None) -> Markup:
    """A heading, a sentence that says how to read what follows, and the figures."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, *children)


def figures(*children: Markup, kind: str = "two") -> Markup:
    """Figures side by side as far as there is room; `kind` is "two", "three" or "one" of them."""
    return tag("div", *children, class_=f"figures {kind}")


def figure(title: str, remark: str, drawing: Markup) -> Markup:
    """A drawing under its title; `remark` is what the title cannot say, or ""."""
    caption = tag("figcaption", tag("strong", title), " " if remark else None, tag("span", remark) if remark else None)
    return tag("figure", caption, drawing)


def series_legend(series: Sequence[Series]) -> Markup | None:
    """Colour, dashes and marker of each series; None where there is nothing to tell apart."""
    if len(series) < 2:
        return None
    return _legend([(_line_sample(each), each.label) for each in series])


def style_legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Legend of pieces of bars: (class in the style sheet, text)."""
    sample = '<svg viewBox="0 0 14 12"><g class="{}"><rect x="0" y="0" width="14" height="12"></rect></g></svg>'
    return _legend([(Markup(sample.format(style)), text) for style, text in entries])


def _legend(entries: Sequence[tuple[Markup, str]]) -> Markup:
    return tag("ul", *(tag("li", joined(sample, text)) for sample, text in entries), class_="legend")


def _line_sample(series: Series) -> Markup:
    line = tag("polyline", points="0,6 26,6")
    drawn = tag(
        "g",
        line,
        marker(13, 6, series.colour + series.variant),
        class_=f"series c{series.colour} d{series.variant % 4}",
    )
    return tag("svg", drawn, viewBox="0 0 26 12", class_="line")
