"""A result that `--save` has written, and what a reader of a page can ask of its drawings."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.lab.bench.timelines import PartTimeline, RingTimeline, RoomTimeline

_SAVED = json.loads((Path(__file__).parent / "saved.json").read_text())
MS = 1_000_000


class Drawing:
    """One SVG, with its axes read back from gridlines and labels as a reader's eye would."""

    def __init__(self, svg: ET.Element) -> None:
        self.svg = svg
        self.width, self.height = (float(each) for each in svg.attrib["viewBox"].split()[2:])

    def texts(self, style: str = "") -> list[str]:
        return [element.text or "" for element in self._texts(style)]

    def _texts(self, style: str) -> list[ET.Element]:
        return [each for each in self.svg.iter("text") if style in each.get("class", "").split() or not style]

    def tips(self) -> list[str]:
        return [element.text or "" for element in self.svg.iter("title")]

    def ticks(self, axis: str) -> list[tuple[float, str]]:
        """Position and label of each tick of "x" or "y"."""
        shift = 4 if axis == "y" else 0
        return [(float(each.attrib[axis]) - shift, each.text or "") for each in self._texts(axis)]

    def groups(self, style: str) -> list[ET.Element]:
        """Groups of that class, in drawing order."""
        return [each for each in self.svg.iter("g") if style in each.get("class", "").split()]

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """Points of each series, by the name that its tooltips begin with."""
        found = {}
        for group in self.groups("series"):
            name = (group.findtext("./g/title") or "").split(" · ")[0]
            route = group.find("polyline")
            points = route.attrib["points"].split() if route is not None else []
            found[name] = [(float(x), float(y)) for x, y in (point.split(",") for point in points)]
        return found

    def boxes(self) -> Iterator[tuple[float, float, float, float]]:
        """(left, top, right, bottom) of every upright text, from its anchor and its length."""
        for text in self.svg.iter("text"):
            if text.get("transform"):
                continue
            wide = 0.52 * 11.5 * len(text.text or "")
            x, y = float(text.attrib["x"]), float(text.attrib["y"])
            anchor = "end" if text.get("class") == "lane" else text.get("text-anchor", "start")
            left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
            yield left, y - 8.5, left + wide, y + 2.5


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


@pytest.fixture
def part() -> Callable[..., PartTimeline]:
    """Makes a staged part whose every stage takes a millisecond."""

    def make(layers: tuple[int, int], ready_ns: int, **changes: Any) -> PartTimeline:
        stages = ("ready", "gate", "queue", "gather", "post", "wire", "arrive", "scatter")
        moments = {stage: ready_ns + number * MS for number, stage in enumerate(stages)}
        life = {"agent": "prefill-0", "peer": "decode-0", "writer": 0, "chunk": 0, "path": "staged"}
        return {**life, "layers": layers, "moments": moments, **changes}  # type: ignore[typeddict-item,return-value]

    return make


@pytest.fixture
def room(part: Callable[..., PartTimeline]) -> Callable[..., RoomTimeline]:
    """Makes a room with a forward pass of 20 ms; decode may start 7 ms after it."""

    def make(*parts: PartTimeline, **changes: Any) -> RoomTimeline:
        second = 1_000 * MS
        life: dict[str, Any] = {
            "title": "staged, pipelined",
            "room": "42",
            "path": "staged",
            "transport": "nixl",
            "pipeline": "on",
            "forward_start_ns": second,
            "forward_done_ns": second + 20 * MS,
            "success_ns": second + 27 * MS,
            "parts": parts or (part((0, 16), second + 10 * MS), part((16, 32), second + 20 * MS)),
        }
        return {**life, **changes}  # type: ignore[typeddict-item,return-value]

    return make


@pytest.fixture
def ring() -> Callable[..., RingTimeline]:
    """Makes a ring sampled every 10 ms."""

    def make(size_mib: int = 64, used_mib: tuple[int, ...] = (0, 32, 48, 0), **changes: Any) -> RingTimeline:
        points = [[10 * MS * number, used << 20] for number, used in enumerate(used_mib)]
        life = {"agent": "decode-0", "path": "staged", "size_bytes": size_mib << 20, "points": points}
        return {**life, **changes}  # type: ignore[typeddict-item,return-value]

    return make
