"""The waterfall: hidden time left of the end of the forward pass, exposed time right of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvctl.lab.bench.html.waterfall import waterfalls

MS = 1_000_000
Drawings = Callable[[str], list[Any]]
Make = Callable[..., Any]


def done_at(chart: Any) -> float:
    """Where the forward pass ends."""
    return float(next(line for line in chart.svg.iter("line") if line.get("class") == "done").attrib["x1"])


class TestRoom:
    def test_hidden_and_exposed_lie_on_either_side_of_the_line(self, room: Make, drawings: Drawings) -> None:
        chart = drawings(waterfalls([room()]) or "")[0]
        early, late = chart.groups("life")
        at = done_at(chart)
        assert all(float(rect.attrib["x"]) + float(rect.attrib["width"]) <= at for rect in early.iter("rect"))
        assert all(float(rect.attrib["x"]) >= at - 0.01 for rect in late.iter("rect"))

    def test_lengths_are_to_scale(self, room: Make, drawings: Drawings) -> None:
        chart = drawings(waterfalls([room()]) or "")[0]
        (minus_ten, _), (zero, _) = [tick for tick in chart.ticks("x") if tick[1] in {"-10", "0"}]
        assert zero == pytest.approx(done_at(chart), abs=0.01)
        per_ms = (zero - minus_ten) / 10
        assert [float(rect.attrib["width"]) / per_ms for rect in chart.groups("life")[0].iter("rect")] == (
            pytest.approx([1.0] * 7, rel=0.01)
        )
        waited = next(rect for rect in chart.svg.iter("rect") if rect.get("class") == "wait")
        assert float(waited.attrib["width"]) / per_ms == pytest.approx(7, rel=0.01)

    def test_no_lane_runs_past_the_room(self, room: Make, part: Make, drawings: Drawings) -> None:
        late = part((0, 16), 1_020 * MS)
        late["moments"]["post"] = 1_040 * MS  # the call that posted the write returned long after decode had scattered
        chart = drawings(waterfalls([room(late)]) or "")[0]
        waited = next(rect for rect in chart.svg.iter("rect") if rect.get("class") == "wait")
        end = float(waited.attrib["x"]) + float(waited.attrib["width"])
        drawn = [rect for lane in chart.groups("life") for rect in lane.iter("rect")]
        assert drawn
        assert all(float(each.attrib["x"]) + float(each.attrib["width"]) <= end + 0.1 for each in drawn)
        assert float(chart.ticks("x")[-1][1]) <= 8  # nor does the axis

    def test_the_caption_says_how_much(self, room: Make) -> None:
        assert "7 ms exposed, 7 ms hidden" in str(waterfalls([room()]))
        none_hidden = room(forward_done_ns=1_000 * MS, forward_start_ns=900 * MS, success_ns=1_030 * MS)
        assert "30 ms exposed, nothing hidden" in str(waterfalls([none_hidden]))

    def test_stages_have_their_own_colours_and_tooltips(self, room: Make, drawings: Drawings) -> None:
        life = drawings(waterfalls([room()]) or "")[0].groups("life")[0]
        styles = [group.get("class") for group in life if group.tag == "g"]
        assert styles == ["gate", "queue", "gather", "post", "wire", "arrive", "scatter"]
        assert life.find("./g/rect/title").text == "prefill-0 → decode-0 · c0 L0-15 · writer 0 · staged\ngate 1 ms"

    def test_lanes_go_by_writer_and_layers(self, room: Make, part: Make, drawings: Drawings) -> None:
        start = 1_005 * MS
        parts = [part((16, 32), start, agent="p1"), part((16, 32), start, agent="p0"), part((0, 16), start, agent="p0")]
        names = drawings(waterfalls([room(*parts)]) or "")[0].texts("lane")
        assert names == ["p0 → decode-0 · c0 L0-15", "p0 → decode-0 · c0 L16-31", "p1 → decode-0 · c0 L16-31"]

    def test_what_all_names_begin_with_is_left_out(self, room: Make, part: Make, drawings: Drawings) -> None:
        parts = [part((0, 16), 1_005 * MS, agent=f"b46-prefill-{rank}", peer="b46-decode-0") for rank in (0, 1)]
        chart = drawings(waterfalls([room(*parts)]) or "")[0]
        assert chart.texts("lane") == [f"prefill-{rank} → decode-0 · c0 L0-15" for rank in (0, 1)]
        assert any("b46-prefill-0 → b46-decode-0" in tip for tip in chart.tips())

    def test_many_lanes_are_named_by_writer_and_too_many_are_counted(
        self, room: Make, part: Make, drawings: Drawings
    ) -> None:
        parts = [part((layer, layer + 1), 1_000 * MS + layer) for layer in range(300)]
        section = waterfalls([room(*parts)]) or ""
        chart = drawings(section)[0]
        assert chart.texts("lane") == ["prefill-0 → decode-0"]
        assert len(chart.groups("life")) == 240
        assert "60 more parts not drawn" in section

    def test_a_long_forward_pass_is_cut_off_and_says_so(self, room: Make, drawings: Drawings) -> None:
        chart = drawings(waterfalls([room(forward_start_ns=-60_000 * MS)]) or "")[0]
        assert "forward 1m01s, starts earlier" in chart.texts("inside")
        widths = [float(rect.attrib["width"]) for rect in chart.groups("life")[0].iter("rect")]
        assert min(widths) > 5

    def test_like_rooms_share_their_axis(self, room: Make, drawings: Drawings) -> None:
        section = waterfalls([room(), room(success_ns=1_035 * MS, title="not pipelined")]) or ""
        first, second = drawings(section)
        assert first.ticks("x") == second.ticks("x")
        assert "All on one time axis" in section

    def test_of_many_rooms_every_way_of_sending_is_shown(self, room: Make, drawings: Drawings) -> None:
        many = [room(title=f"{how} {load}", pipeline=how) for load in range(8) for how in ("off", "on")]
        section = waterfalls([*many, room(title="sliced", path="slice")]) or ""
        assert len(drawings(section)) == 6
        assert "6 of 17 rooms" in section
        for shown in ("off 7", "on 7", "sliced"):
            assert f"<strong>{shown}</strong>" in section

    def test_a_part_of_one_layer_or_none_is_named_so(self, room: Make, part: Make, drawings: Drawings) -> None:
        parts = [part((0, 0), 1_005 * MS, chunk=2), part((3, 4), 1_005 * MS, chunk=3)]
        chart = drawings(waterfalls([room(*parts)]) or "")[0]
        assert chart.texts("lane") == ["prefill-0 → decode-0 · c2", "prefill-0 → decode-0 · c3 L3"]

    def test_rooms_without_parts_are_not_drawn(self, room: Make, part: Make) -> None:
        assert waterfalls([]) is None
        assert waterfalls([room(part((0, 8), 0, moments={}))]) is None
