"""The presets: their options, and the columns of their tables."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.commands.bench_options import bench_options
from kvctl.lab.bench.preset_views import STAGING
from kvctl.lab.bench.presets import PRESETS
from kvctl.lab.bench.views import contestants
from kvctl.lab.ranks.request import Tokens
from kvctl.render.view import View

DEFAULTS: dict[str, Any] = {"tokens": Tokens(values=(1024,)), "concurrency": 4, "sweep": (), "repeat": 1, "layer_ms": 0}


def row(path: str, concurrency: int = 4, **changes: Any) -> dict[str, Any]:
    figures = {"fleet": "", "transport": "nixl", "cp_mode": "rank0", "pipeline": "off", "tokens": 64}
    measured = {"tokens_drawn": "64", "tokens_per_s": 100.0, "ttft_ms": {"mean": 8.0}, "rooms": 7}
    return {"path": path, "concurrency": concurrency, **figures, **measured, **changes}


def test_every_published_table_is_there():
    assert list(PRESETS) == [
        "staging-sweep",
        "staging-overhead",
        "p2d4",
        "p4d4",
        "pipeline-sweep",
        "multi-turn",
        "stress",
        "cp",
    ]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_speaks_of_options_that_exist(preset: Any):
    names = {param.name for param in bench_options()}
    assert set(preset.options) <= names
    assert all(set(fleet.options) <= names for wave in preset.fleets for fleet in wave)
    assert isinstance(preset.table, View)


def test_the_staging_sweep_goes_from_1_to_1024():
    preset = PRESETS["staging-sweep"]
    loads = preset.loads({**DEFAULTS, **preset.options})
    assert [load.concurrency for load in loads] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert (preset.rooms(1), preset.rooms(1024)) == (16, 1024)


@pytest.mark.parametrize("name", ["p2d4", "p4d4"])
def test_all_prompts_come_at_once_four_times(name: str):
    preset = PRESETS[name]
    assert [preset.rooms(load.concurrency) for load in preset.loads({**DEFAULTS, **preset.options})] == [
        1 << power for power in range(10)
    ]
    assert preset.options["repeat"] == 4


def test_the_pipeline_sweep_has_prompt_lengths_with_one_room_at_a_time():
    preset = PRESETS["pipeline-sweep"]
    loads = preset.loads({**DEFAULTS, **preset.options})
    assert [load.tokens.values[0] for load in loads] == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert {load.concurrency for load in loads} == {1}
    assert preset.options["layer_ms"] > 0


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
