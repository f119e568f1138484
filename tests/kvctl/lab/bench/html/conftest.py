"""A result that `--save` has written, and what a reader of a page can ask of its drawings."""

from __future__ import annotations

import copy
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import vl_convert

_SAVED = json.loads((Path(__file__).parent / "saved.json").read_text())
_PAIR = r"(-?[\d.e-]+),(-?[\d.e-]+)"


class Drawing:
    """One SVG as a reader sees it: its texts, its axes, and its marks with their tooltips."""

    def __init__(self, svg: ET.Element) -> None:
        self.name = svg.get("aria-label")
        self._svg = svg

    def texts(self) -> list[str]:
        """Notes, names of limits and titles of columns, without axes and legends."""
        groups = self._groups("role-mark", "role-column-header")
        return [each.text or "" for group in groups for each in group.iter("text")]

    def legend(self) -> list[str]:
        return [each.text or "" for group in self._groups("role-legend-label") for each in group.iter("text")]

    def tips(self) -> list[str]:
        return [element.text or "" for element in self._svg.iter("title")]

    def axis(self, axis: str) -> str:
        """Title, scale and ends of axis "X" or "Y", as a screen reader reads them out."""
        labels = (each.get("aria-label", "") for each in self._svg.iter("g"))
        return next(label for label in labels if label.startswith(f"{axis}-axis"))

    def ticks(self, axis: str) -> list[str]:
        """Labels of axis "X" or "Y"."""
        group = next(each for each in self._svg.iter("g") if each.get("aria-label", "").startswith(f"{axis}-axis"))
        labels = (each for each in group.iter("g") if "role-axis-label" in each.get("class", ""))
        return [text.text or "" for each in labels for text in each.iter("text") if text.get("opacity") != "0"]

    def points(self) -> list[tuple[str, float, float]]:
        """Tooltip and position of each point."""
        marks = [each for each in self._svg.iter("path") if each.get("aria-roledescription") == "point"]
        places = [re.match(rf"translate\({_PAIR}\)", each.attrib["transform"]) for each in marks]
        return [
            (mark.get("aria-label", ""), float(at[1]), float(at[2]))
            for mark, at in zip(marks, places, strict=True)
            if at
        ]

    def bars(self) -> list[tuple[str, float, float, str]]:
        """Tooltip, start, width and colour of each piece of a bar."""
        marks = [each for each in self._svg.iter("path") if each.get("aria-roledescription") == "bar"]
        shapes = [re.match(rf"M{_PAIR}h(-?[\d.e-]+)", each.attrib["d"]) for each in marks]
        return [
            (mark.get("aria-label", ""), float(shape[1]), float(shape[3]), mark.get("fill", ""))
            for mark, shape in zip(marks, shapes, strict=True)
            if shape
        ]

    def _groups(self, *styles: str) -> list[ET.Element]:
        return [each for each in self._svg.iter("g") if set(styles) & set(each.get("class", "").split())]


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch, chart_engine: None) -> None:
    """Draws each specification once, because most tests show the same document."""
    monkeypatch.setattr(
        vl_convert, "vegalite_to_svg", lambda spec, *args, **more: _drawn(json.dumps(spec), *map(json.dumps, args))
    )


@pytest.fixture
def charts_left_out(drawn_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces charts by empty drawings, for tests of the rest of the page."""
    monkeypatch.setattr(vl_convert, "vegalite_to_svg", lambda *_, **more: '<svg viewBox="0 0 1 1"></svg>')


@cache
def _drawn(*args: str, draw: Callable[..., str] = vl_convert.vegalite_to_svg) -> str:
    return draw(*map(json.loads, args), allowed_base_urls=[])


@pytest.fixture
def document() -> dict[str, Any]:
    """Three paths at concurrency 1, 2 and 4; nothing pipelined."""
    return copy.deepcopy(_SAVED)


@pytest.fixture
def drawings() -> Callable[[str], list[Drawing]]:
    """All charts in some markup; legends' samples are not charts."""

    def find(markup: str) -> list[Drawing]:
        root = ET.fromstring(markup if markup.startswith("<!DOCTYPE") else f"<div>{markup}</div>")
        return [Drawing(svg) for svg in root.iter("svg") if svg.get("role") == "img"]

    return find
