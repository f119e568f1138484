"""Grouping of runs into series, labels, and the choice of charts."""

from __future__ import annotations

from typing import Any

from kvctl.lab.bench.html.series import AXES, arranged, common_load, facets, series_of

CONCURRENCY, TOKENS, RATIO = AXES


def run(path: str = "staged", concurrency: int = 4, tokens: int = 1024, **more: Any) -> dict[str, Any]:
    return {"path": path, "transport": "nixl", "pipeline": "off", "concurrency": concurrency, "tokens": tokens, **more}


class TestSeries:
    def test_only_what_differs_is_named(self) -> None:
        assert [each.label for each in series_of([run(), run("slice")])] == ["staged", "slice"]
        assert [each.label for each in series_of([run(), run(pipeline="on")])] == ["not pipelined", "pipelined"]
        several = [
            run(cp_mode="rank0"),
            run(cp_mode="all"),
            run("slice", cp_mode="all"),
            run("slice", cp_mode="all", transport="mooncake"),
        ]
        assert [each.label for each in series_of(several)[1:]] == [
            "staged CP all nixl",
            "slice CP all nixl",
            "slice CP all mooncake",
        ]

    def test_one_series_is_called_by_its_path(self) -> None:
        assert [each.label for each in series_of([run(), run(concurrency=8)])] == ["staged"]

    def test_a_path_keeps_its_colour_whatever_stands_beside_it(self) -> None:
        alone = series_of([run("auto")])[0].colour
        assert {each.label: each.colour for each in series_of([run("slice"), run("auto")])}["auto"] == alone

    def test_dashes_tell_the_second_difference(self) -> None:
        runs = [run(path, pipeline=pipeline) for path in ("staged", "slice") for pipeline in ("off", "on")]
        assert [each.variant for each in series_of(runs)] == [0, 1, 0, 1]
        assert len({each.colour for each in series_of(runs)}) == 2

    def test_no_two_of_many_series_look_alike(self) -> None:
        series = series_of([run(f"path-{number}") for number in range(16)])
        assert len({(each.colour, each.variant) for each in series}) == 16

    def test_the_same_load_again_is_another_series(self) -> None:
        series = series_of([run(), run(concurrency=8)] * 3)
        assert [each.label for each in series] == ["staged", "staged (2)", "staged (3)"]
        assert [len(each.runs) for each in series] == [2, 2, 2]

    def test_what_follows_from_the_rest_is_not_named(self) -> None:
        fleets = [run("bulk", fleet="same", prefill="dp4"), run("staged", fleet="mixed", prefill="tp4")]
        assert [each.label for each in series_of(fleets)] == ["bulk", "staged"]
        assert [each.label for each in series_of([run(fleet="cp2"), run(fleet="cp4")])] == ["cp2", "cp4"]


class TestFacets:
    def test_a_grid_has_a_plot_for_each_value_of_the_other_axis(self) -> None:
        grid = [run(concurrency=conc, tokens=tokens) for conc in (4, 1, 16) for tokens in (256, 1024)]
        found, left_out = facets(grid, [CONCURRENCY])
        assert [facet.fixed for facet in found] == ["256 tokens", "1,024 tokens"]
        assert [found[0].at(each) for each in found[0].series[0].runs] == [1, 4, 16]
        assert left_out == 0

    def test_compute_beside_the_transfer_is_an_axis(self) -> None:
        ratios = [
            run(ratio=ratio, layer_ms=1 / ratio, pipeline=how) for ratio in (4.004, 0.25) for how in ("off", "on")
        ]
        found, _ = facets([run(), *ratios, run(concurrency=32, ratio=1.0)], [RATIO])
        assert [facet.fixed for facet in found] == ["concurrency 4 · 1,024 tokens"]
        assert [found[0].at(each) for each in found[0].series[1].runs] == [0.25, 4]

    def test_one_point_is_no_line(self) -> None:
        assert facets([run(), run("slice")], [CONCURRENCY]) == ([], 0)

    def test_too_many_plots_are_thinned_out_and_it_is_said(self) -> None:
        grid = [run(concurrency=conc, tokens=tokens) for conc in (1, 2) for tokens in range(1, 12)]
        found, left_out = facets(grid, [CONCURRENCY])
        assert len(found) + left_out == 11
        assert (found[0].fixed, found[-1].fixed) == ("1 tokens", "11 tokens")

    def test_runs_without_concurrency_are_on_no_axis_of_it(self) -> None:
        assert facets([run(concurrency=None), run(concurrency=None, tokens=7)], [CONCURRENCY])[0] == []  # type: ignore[arg-type]


class TestArranged:
    def test_series_stand_side_by_side_under_their_load(self) -> None:
        runs = [run(path, conc) for conc in (1, 4) for path in ("slice", "staged")]
        groups = arranged(runs, max_label=100)
        assert [heading for heading, _ in groups] == ["concurrency 1", "concurrency 4"]
        assert [entry.label for entry in groups[0][1]] == ["slice", "staged"]
        assert common_load(runs) == "1,024 tokens"

    def test_long_names_become_headings(self) -> None:
        runs = [run(conc=conc, concurrency=conc, pipeline=how) for conc in (1, 4) for how in ("off", "measured")]
        groups = arranged(runs, max_label=10)
        assert [heading for heading, _ in groups] == ["not pipelined", "pipeline measured"]
        assert [entry.label for entry in groups[0][1]] == ["concurrency 1", "concurrency 4"]

    def test_one_load_has_no_heading(self) -> None:
        assert arranged([run(), run("slice")], 100)[0][0] == ""
