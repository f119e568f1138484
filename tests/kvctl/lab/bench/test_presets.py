"""The presets: their options, and the columns of their tables."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.commands.bench_options import bench_options
from kvctl.lab.bench.preset_views import STAGING
from kvctl.lab.bench.presets import PRESETS
from kvctl.lab.bench.views import contestants
from kvctl.render.view import View


def row(path: str, concurrency: int = 4, **changes: Any) -> dict[str, Any]:
    figures = {"fleet": "", "transport": "nixl", "cp_mode": "rank0", "pipeline": "off", "tokens": 64}
    measured = {"tokens_drawn": "64", "tokens_per_s": 100.0, "ttft_ms": {"mean": 8.0}, "rooms": 7}
    return {"path": path, "concurrency": concurrency, **figures, **measured, **changes}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_speaks_of_options_that_exist(preset: Any):
    names = {param.name for param in bench_options()}
    assert set(preset.options) | set(preset.in_host_memory) <= names
    assert all(set(fleet.options) <= names for wave in preset.fleets for fleet in wave)
    assert isinstance(preset.table, View)


def test_each_change_is_that_of_its_own_figure():
    changes = {"delta_ratio": 1.5, "delta_significant": True, "ttft_delta_ratio": -0.75, "ttft_delta_significant": None}
    columns = {
        column.name: column.human(row("staged", **changes)) for column in STAGING.columns if "delta" in column.name
    }
    assert columns == {"delta": "+150%", "ttft_delta": "-75%?"}


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([row("slice"), row("staged")], ["slice", "staged"]),
        ([row("staged")], ["staged"]),
        ([row("staged"), row("staged", transport="mooncake")], ["nixl", "mooncake"]),
        ([row("bulk", fleet="homogeneous"), row("staged", fleet="staged")], ["homogeneous", "staged"]),
        ([row("staged", pipeline=how) for how in ("off", "on")], ["off", "on"]),
        (
            [row(path, cp_mode=mode) for mode in ("rank0", "all") for path in ("bulk", "staged")],
            ["rank0 bulk", "rank0 staged", "all bulk", "all staged"],
        ),
    ],
)
def test_contestants_are_called_by_what_sets_them_apart(rows: list[dict[str, Any]], names: list[str]):
    assert contestants(rows) == names
