"""Points match the axes, bars have the length of their values, and labels do not overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvctl.lab.bench.html.plots import exposed, latencies, rooflines, stages, throughput

Drawings = Callable[[str], list[Any]]


def read_back(ticks: Sequence[tuple[float, str]], at: float, log: bool) -> float:
    """The value at a position, from the first and the last tick."""
    (start, low), (end, high) = ((place, float(text.replace(",", ""))) for place, text in (ticks[0], ticks[-1]))
    ratio = (at - start) / (end - start)
    return math.exp(math.log(low) + ratio * math.log(high / low)) if log else low + ratio * (high - low)


def assert_no_overlap(drawing: Any) -> None:
    boxes = list(drawing.boxes())
    for (left, top, right, bottom), (left2, top2, right2, bottom2) in itertools.combinations(boxes, 2):
        assert right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
    for left, top, right, bottom in boxes:
        assert left >= -1
        assert right <= drawing.width + 1
        assert top >= -1
        assert bottom <= drawing.height


class TestThroughput:
    def test_points_are_where_the_axes_say(self, document: dict[str, Any], drawings: Drawings) -> None:
        chart = drawings(throughput(document["runs"], rooflines(document)) or "")[0]
        for run in document["runs"]:
            x, y = chart.lines()[run["path"]][(1, 2, 4).index(run["concurrency"])]
            assert read_back(chart.ticks("x"), x, log=True) == pytest.approx(run["concurrency"], rel=0.01)
            assert read_back(chart.ticks("y"), y, log=True) == pytest.approx(run["gb_per_s"], rel=0.01)

    def test_floors_are_on_the_axis_with_their_names(self, document: dict[str, Any], drawings: Drawings) -> None:
        chart = drawings(throughput(document["runs"], rooflines(document)) or "")[0]
        levels = {group.findtext("text"): group.find("line") for group in chart.groups("level")}
        assert list(levels) == ["one memcpy 12.3 GB/s", "one write 16.4 GB/s"]
        at = float(levels["one memcpy 12.3 GB/s"].attrib["y1"])
        assert read_back(chart.ticks("y"), at, log=True) == pytest.approx(12.3, rel=0.01)

    def test_unknown_floors_are_not_drawn(self, document: dict[str, Any]) -> None:
        assert len(rooflines(document)) == 2
        assert rooflines({"floors": {"memcpy_gb_per_s": math.nan}}) == rooflines({}) == []

    def test_between_gpus_a_copy_within_one_is_no_floor(self, document: dict[str, Any]) -> None:
        document["floors"] = {"device_copy_gb_per_s": 2100.0, "p2p_gb_per_s": None}
        assert [level.label for level in rooflines(document)] == ["one device copy 2,100 GB/s"]
        document["floors"]["p2p_gb_per_s"] = 390.0
        assert [level.label for level in rooflines(document)] == ["one peer-to-peer copy 390 GB/s"]

    def test_each_transport_has_its_own_floor(self, document: dict[str, Any]) -> None:
        document["floors"]["write_gb_per_s_by_transport"] = {"nixl": 16.0, "mooncake": 4.0}
        names = [level.label for level in rooflines(document)]
        assert names == ["one write over mooncake 4 GB/s", "one memcpy 12.3 GB/s", "one write over nixl 16 GB/s"]

    def test_rates_near_each_other_start_at_zero(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [run for run in document["runs"] if run["path"] != "slice"]
        chart = drawings(throughput(runs, []) or "")[0]
        assert chart.ticks("y")[0][1] == "0"
        _, y = chart.lines()["staged"][2]
        assert read_back(chart.ticks("y"), y, log=False) == pytest.approx(2.54, rel=0.01)

    def test_a_single_load_is_bars_from_zero(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [run for run in document["runs"] if run["concurrency"] == 4]
        chart = drawings(throughput(runs, rooflines(document)) or "")[0]
        assert not chart.lines()
        ticks = chart.ticks("x")
        assert ticks[0][1] == "0"
        for run, bar in zip(runs, chart.groups("bar"), strict=True):
            rect = bar.find(".//rect")
            end = float(rect.attrib["x"]) + float(rect.attrib["width"])
            assert read_back([(place, text) for place, text in ticks], end, log=False) == pytest.approx(
                run["gb_per_s"], abs=0.1
            )

    def test_a_tooltip_tells_the_whole_run(self, document: dict[str, Any], drawings: Drawings) -> None:
        tip = next(tip for tip in drawings(throughput(document["runs"], []) or "")[0].tips() if "staged" in tip)
        assert tip.startswith("staged · concurrency 1 · 256 tokens\n1.52 GB/s")
        assert "8 rooms, verified" in tip

    def test_what_moved_nothing_has_no_section(self, document: dict[str, Any]) -> None:
        assert throughput([{**document["runs"][0], "gb_per_s": 0.0}], []) is None


class TestLatencies:
    def test_a_plot_for_each_quantile_on_one_scale(self, document: dict[str, Any], drawings: Drawings) -> None:
        charts = drawings(latencies([{**run, "ttft_ms": None} for run in document["runs"]]))
        assert [chart.svg.get("aria-label").split()[1] for chart in charts] == ["p50", "p95", "p99"]
        assert charts[0].ticks("y") == charts[1].ticks("y") == charts[2].ticks("y")
        _, y = charts[2].lines()["slice"][2]
        assert read_back(charts[2].ticks("y"), y, log=True) == pytest.approx(377, rel=0.01)

    def test_prompts_are_an_axis_too(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [{**document["runs"][1], "tokens": tokens} for tokens in (256, 1024, 16384)]
        chart = drawings(latencies(runs))[0]
        assert [text for _, text in chart.ticks("x")] == ["256", "1,024", "16,384"]
        assert "prompt length (tokens)" in chart.texts("name")

    def test_a_single_load_is_nested_bars(self, document: dict[str, Any], drawings: Drawings) -> None:
        chart = drawings(latencies(document["runs"][:3]))[0]
        assert chart.texts("note")[0] == "p50 90.5 ms · p95 137 ms · p99 153 ms"
        widths = [float(rect.attrib["width"]) for rect in chart.groups("bar")[0].iter("rect")]
        assert sum(widths[:2]) / sum(widths) == pytest.approx(137.2 / 153.1, rel=0.01)


class TestShares:
    def test_nothing_hidden_has_no_section(self, document: dict[str, Any]) -> None:
        assert exposed(document["runs"]) is None
        assert exposed([{**run, "hidden_ms": {"mean": 0.0}} for run in document["runs"]]) is None

    def test_exposed_stands_on_hidden(self, document: dict[str, Any], drawings: Drawings) -> None:
        timed = {"exposed_ms": {"mean": 5.0}, "hidden_ms": {"mean": 15.0}}
        runs = [{**document["runs"][1], **timed}, {**document["runs"][2], **timed, "hidden_ms": {"mean": 0.0}}]
        chart = drawings(exposed(runs) or "")[0]
        hidden, waited = (float(rect.attrib["width"]) for rect in chart.groups("bar")[0].iter("rect"))
        assert hidden / waited == pytest.approx(3, rel=0.01)
        assert chart.texts("note") == ["5 ms exposed, 75 % hidden", "5 ms exposed, 0 % hidden"]
        assert chart.texts("name") == ["ms"]

    def test_loads_too_different_for_one_scale_are_shares(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [
            {**document["runs"][1], "tokens": tokens, "exposed_ms": {"mean": ms}, "hidden_ms": {"mean": ms}}
            for tokens, ms in ((256, 1.0), (16384, 100.0))
        ]
        for chart in drawings(exposed(runs) or ""):
            assert chart.texts("name") == ["share of the time"]
            hidden, waited = (float(rect.attrib["width"]) for rect in chart.groups("bar")[0].iter("rect"))
            assert hidden == pytest.approx(waited)

    def test_stages_that_a_path_does_not_have_take_no_room(self, document: dict[str, Any], drawings: Drawings) -> None:
        chart = drawings(stages(document["runs"][:2]) or "")[0]
        slice_bar, staged_bar = chart.groups("bar")
        assert [group.get("class") for group in slice_bar.iter("g") if group.find("rect") is not None] == [
            "gate",
            "post",
            "wire",
        ]
        assert len(list(staged_bar.iter("rect"))) == 5

    def test_no_stage_times_no_section(self, document: dict[str, Any]) -> None:
        assert stages([{**run, "stages_us": {}} for run in document["runs"]]) is None


class TestLabels:
    def test_nothing_overlaps_or_is_cut_off(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [
            {**document["runs"][row], "concurrency": concurrency, "pipeline": pipeline, "hidden_ms": {"mean": 7.0}}
            for concurrency in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
            for row in (0, 1, 2)
            for pipeline in ("off", "on", "measured")
        ]
        for some in (runs, runs[:9], runs[:1], runs[::9], document["runs"]):
            pieces = [throughput(some, rooflines(document)), latencies(some), exposed(some), stages(some)]
            charts = drawings("".join(str(piece) for piece in pieces if piece))
            assert len(charts) >= 4
            for chart in charts:
                assert_no_overlap(chart)

    def test_lines_that_end_together_have_their_names_apart(self, document: dict[str, Any], drawings: Drawings) -> None:
        base = document["runs"][1]
        names = ("bulk", "slice", "staged", "auto", "direct")
        runs = [{**base, "path": name, "concurrency": concurrency} for name in names for concurrency in (1, 2)]
        chart = drawings(throughput(runs, []) or "")[0]
        assert sorted(chart.texts("end")) == sorted(names)
        assert_no_overlap(chart)
