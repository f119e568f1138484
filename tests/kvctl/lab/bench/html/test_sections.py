"""Sections with charts: which runs they show, on which scale, and what their tooltips tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.lab.bench.html.sections import (
    busy_engines,
    exposed,
    latencies,
    rooflines,
    stages,
    throughput,
)

Drawings = Callable[[str], list[Any]]


class TestThroughput:
    def test_a_sweep_is_a_line_per_path_on_a_logarithmic_axis(
        self, document: dict[str, Any], drawings: Drawings
    ) -> None:
        rates, rooms = drawings(throughput(document["runs"], rooflines(document)) or "")
        assert (rates.name, rooms.name) == ("Throughput over concurrency", "Rooms over concurrency")
        assert rates.axis("X").startswith("X-axis titled 'concurrency' for a log scale")
        assert rates.axis("Y").startswith("Y-axis titled 'GB/s' for a log scale")
        assert (rates.legend(), rates.ticks("X")) == (["slice", "staged", "auto"], ["1", "2", "4"])
        assert "staged · concurrency 4 · 256 tokens\n2.54 GB/s" in "\n".join(rates.tips())
        assert "8 rooms, verified" in rates.tips()[0]
        assert {"one memcpy 12.3 GB/s", "one write 16.4 GB/s"} <= set(rates.texts())

    def test_rates_near_each_other_start_at_zero(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [run for run in document["runs"] if run["path"] != "slice"]
        chart = drawings(throughput(runs, []) or "")[0]
        assert chart.axis("Y") == "Y-axis titled 'GB/s' for a linear scale with values from 0 to 3"

    def test_a_single_load_is_bars_from_zero(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [run for run in document["runs"] if run["concurrency"] == 4]
        chart = drawings(throughput(runs, rooflines(document)) or "")[0]
        assert not chart.points()
        widths = [width for _, _, width, _ in chart.bars()]
        assert [each / widths[0] for each in widths] == pytest.approx(
            [run["gb_per_s"] / runs[0]["gb_per_s"] for run in runs], rel=0.01
        )
        assert chart.ticks("Y") == ["slice", "staged", "auto"]

    def test_a_grid_of_loads_is_thinned_out_and_it_is_said(self, document: dict[str, Any], drawings: Drawings) -> None:
        runs = [
            {**document["runs"][1], "concurrency": at, "tokens": tokens}
            for at in (1, 2)
            for tokens in range(16, 192, 16)
        ]
        section = throughput(runs, []) or ""
        assert "7 more loads are in the table only" in section
        assert len(drawings(section)[0].points()) == 8

    def test_what_moved_nothing_has_no_section(self, document: dict[str, Any]) -> None:
        assert throughput([{**document["runs"][0], "gb_per_s": 0.0, "rooms_per_s": 0.0}], []) is None


class TestRooflines:
    def test_unknown_floors_are_not_drawn(self, document: dict[str, Any]) -> None:
        assert len(rooflines(document)) == 2
        assert rooflines({"floors": {"memcpy_gb_per_s": math.nan, "write_gb_per_s_by_transport": {}}}) == []

    def test_between_gpus_a_copy_within_one_is_no_floor(self, document: dict[str, Any]) -> None:
        document["floors"] = {"device_copy_gb_per_s": 2100.0, "p2p_gb_per_s": None, "write_gb_per_s_by_transport": {}}
        assert [level.label for level in rooflines(document)] == ["one device copy 2,100 GB/s"]
        document["floors"]["p2p_gb_per_s"] = 390.0
        assert [level.label for level in rooflines(document)] == ["one peer-to-peer copy 390 GB/s"]

    def test_each_transport_has_its_own_floor(self, document: dict[str, Any]) -> None:
        document["floors"]["write_gb_per_s_by_transport"] = {"nixl": 16.0, "mooncake": 4.0}
        names = [level.label for level in rooflines(document)]
        assert names == ["one write over mooncake 4 GB/s", "one memcpy 12.3 GB/s", "one write over nixl 16 GB/s"]


class TestTimes:
    def test_a_plot_for_each_quantile_on_one_scale(self, document: dict[str, Any], drawings: Drawings) -> None:
        (chart,) = drawings("".join(latencies([{**run, "ttft_ms": None} for run in document["runs"]])))
        assert {"p50", "p95", "p99"} <= set(chart.texts())
        assert chart.axis("Y").startswith("Y-axis titled 'ms' for a log scale")
        assert len(chart.points()) == 3 * len(document["runs"])
        assert "slice · concurrency 4 · 256 tokens\n377 ms p99" in "\n".join(chart.tips())

    def test_a_single_load_is_nested_bars(self, document: dict[str, Any], drawings: Drawings) -> None:
        chart = drawings("".join(latencies(document["runs"][:3])))[0]
        assert "p50 90.5 · p95 137 · p99 153" in chart.texts()
        widths = [width for _, _, width, _ in chart.bars()[:3]]
        assert sum(widths[:2]) / sum(widths) == pytest.approx(137.2 / 153.1, rel=0.01)

    def test_exposed_stands_on_hidden(self, document: dict[str, Any], drawings: Drawings) -> None:
        assert exposed(document["runs"]) is None
        timed = {"exposed_ms": {"mean": 5.0}, "hidden_ms": {"mean": 15.0}}
        chart = drawings(exposed([{**document["runs"][1], **timed}]) or "")[0]
        hidden, waited = (width for _, _, width, _ in chart.bars())
        assert hidden / waited == pytest.approx(3, rel=0.01)
        assert [colour for *_, colour in chart.bars()] == ["var(--hidden)", "var(--wait)"]
        assert "20 ms" in chart.texts()

    def test_loads_too_different_for_one_scale_have_their_own(
        self, document: dict[str, Any], drawings: Drawings
    ) -> None:
        runs = [
            {**document["runs"][1], "tokens": tokens, "exposed_ms": {"mean": ms}, "hidden_ms": {"mean": ms}}
            for tokens, ms in ((256, 1.0), (16384, 100.0))
        ]
        (chart,) = drawings(exposed(runs) or "")
        widths = [width for _, _, width, _ in chart.bars()]
        assert widths == pytest.approx([widths[0]] * 4)

    def test_stages_that_a_path_does_not_have_take_no_room(self, document: dict[str, Any], drawings: Drawings) -> None:
        chart = drawings(stages(document["runs"][:2]) or "")[0]
        colours = [colour[len("var(--") : -1] for _, _, width, colour in chart.bars() if width]
        assert colours == ["gate", "post", "wire", "gate", "gather", "post", "wire", "scatter"]
        assert stages([{**run, "stages_us": {}} for run in document["runs"]]) is None

    def test_a_busy_engine_has_its_slowdown_and_the_rooms_that_were_asked_for(
        self, document: dict[str, Any], drawings: Drawings
    ) -> None:
        assert busy_engines(document["runs"]) is None
        timed = {"engine_slowdown_ratio": 0.25, "engine_stall_ms": 3.0, "asked_rooms_per_s": 7.0}
        runs = [{**run, **timed, "served_rooms_per_s": 6.5} for run in document["runs"][:2]]
        rooms, slower, stalls = drawings(busy_engines(runs) or "")
        assert (rooms.texts()[-1], slower.texts()[-1], stalls.texts()[-1]) == ("asked 7 rooms/s", "25", "3")
