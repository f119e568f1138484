"""The charts of rings: steps between samples, on the scale of the ring's size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.lab.bench.html.plots import rings

Drawings = Callable[[str], list[Any]]
Make = Callable[..., Any]


def corners(chart: Any) -> list[tuple[str, float]]:
    path = next(chart.svg.iter("path")).attrib["d"]
    return [(letter, float(number)) for letter, number in re.findall(r"([HV])(-?[\d.]+)", path)]


class TestRings:
    def test_a_sample_holds_until_the_next(self, ring: Make, drawings: Drawings) -> None:
        chart = drawings(rings([ring()]) or "")[0]
        height = {text: at for at, text in chart.ticks("y")}
        place = {text: at for at, text in chart.ticks("x")}
        drawn = corners(chart)
        assert drawn[2][1] == pytest.approx(place["10"], abs=0.02)
        assert drawn[3][1] == pytest.approx(height["32"], abs=0.02)
        assert drawn[5][1] == pytest.approx(height["48"], abs=0.02)

    def test_the_capacity_is_on_the_axis(self, ring: Make, drawings: Drawings) -> None:
        section = rings([ring()]) or ""
        chart = drawings(section)[0]
        assert [text for _, text in chart.ticks("y")] == ["0", "16", "32", "48", "64"]
        assert chart.groups("level")[0].findtext("text") == "capacity 64 MiB"
        assert "peak 48 MiB of 64 MiB, 75 %" in section

    def test_a_ring_hardly_used_is_drawn_to_its_peak(self, ring: Make, drawings: Drawings) -> None:
        chart = drawings(rings([ring(size_mib=4096, used_mib=(0, 5, 0))]) or "")[0]
        assert [text for _, text in chart.ticks("y")] == ["0", "1", "2", "3", "4", "5"]
        assert not chart.groups("level")

    def test_rings_of_one_path_share_their_time(self, ring: Make, drawings: Drawings) -> None:
        late = ring(agent="decode-1", points=[[30_000_000, 1 << 20], [90_000_000, 48 << 20]])
        first, second = drawings(rings([ring(), late]) or "")
        assert first.ticks("x") == second.ticks("x")
        place = {text: at for at, text in second.ticks("x")}
        assert corners(second)[0][1] == pytest.approx((place["20"] + place["40"]) / 2, abs=0.02)

    def test_rings_sampled_at_other_times_do_not(self, ring: Make, drawings: Drawings) -> None:
        later = ring(points=[[10**12, 0], [10**12 + 3 * 10**6, 48 << 20]])
        section = rings([ring(), later]) or ""
        first, second = drawings(section)
        assert first.ticks("x")[-1][1] == "30"
        assert second.ticks("x")[-1][1] == "3"
        assert "<strong>decode-0 · staged</strong>" in section

    def test_the_fullest_of_many_are_shown(self, ring: Make, drawings: Drawings) -> None:
        many = [ring(agent=f"decode-{number}", used_mib=(0, number)) for number in range(20)]
        section = rings(many) or ""
        assert len(drawings(section)) == 12
        assert "decode-19 ·" in section
        assert "decode-3 ·" not in section
        assert "The 12 fullest of 20 rings" in section

    def test_one_sample_is_no_plot(self, ring: Make) -> None:
        assert rings([]) is None
        assert rings([ring(used_mib=(3,))]) is None

    def test_an_empty_ring_has_an_axis(self, ring: Make, drawings: Drawings) -> None:
        assert drawings(rings([ring(used_mib=(0, 0))]) or "")[0].ticks("y")[0][1] == "0"
