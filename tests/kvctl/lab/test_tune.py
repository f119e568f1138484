"""The search of `kvctl tune`: which benches it runs, and which candidate it recommends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvctl.lab.tune import Candidate, tune

Speed = Callable[[Mapping[str, Any]], float]


def candidate(rooms_per_s: float = 10.0, p50_ms: float = 5.0, **changes: Any) -> Candidate:
    row = {
        "rooms_per_s": rooms_per_s,
        "latency_ms": {"p50": p50_ms},
        "hidden_ms": {"mean": 3.0},
        "exposed_ms": {"mean": 1.0},
        "layer_ms": changes.pop("layer_ms", 0.0),
    }
    settings: dict[str, Any] = {
        "path": "staged",
        "page_size": 16,
        "chunk_tokens": 8192,
        "cp_mode": "",
        "pipeline": "off",
    }
    return Candidate(**{"ring_bytes": 0, "padded_ratio": 0.0, **settings, **changes}, row=row)


def search(speed: Speed, **changes: Any) -> tuple[list[Candidate], list[str]]:
    """Runs a search in which `speed` decides the rooms per second from the settings."""
    ran: list[str] = []

    def measured(name: str, options: Mapping[str, Any]) -> Iterator[Candidate]:
        ran.append(name)
        for mode in options["cp_modes"]:
            for path in options.get("paths", ("slice", "staged")):
                for pipeline in options.get("pipelines", ("off",)):
                    settings = {
                        "path": path,
                        "page_size": options["page_size"],
                        "chunk_tokens": options.get("chunk_tokens", 8192),
                        "cp_mode": mode if mode != "rank0" or len(options["cp_modes"]) > 1 else "",
                        "pipeline": pipeline,
                    }
                    yield candidate(speed(settings), **settings)

    limits = {"page_sizes": (16, 32), "cp_modes": ("rank0",), "prompt_tokens": 4096, "layers": 32, "layer_ms": 0.0}
    return tune(measured, **{**limits, **changes}), ran


def test_one_setting_after_another_keeps_its_best_value() -> None:
    def speed(settings: Mapping[str, Any]) -> float:
        return (
            1.0
            + 10.0 * (settings["path"] == "staged")
            + 3.0 * (settings["page_size"] == 32)
            + (2.0 * (settings["chunk_tokens"] == 2048))
        )

    (best, *others), ran = search(speed)
    assert (best.path, best.page_size, best.chunk_tokens, best.recommended) == ("staged", 32, 2048, True)
    assert ran == ["paths", "page size", "chunk", "chunk"]
    assert not any(each.recommended for each in others)
    assert [each.rooms_per_s for each in others] == sorted((each.rooms_per_s for each in others), reverse=True)


def test_equal_settings_leave_things_as_they_are() -> None:
    (best, *_), _ = search(lambda settings: 10.0 + (settings["page_size"] == 32) * 0.9)
    assert (best.path, best.page_size, best.chunk_tokens) == ("slice", 16, 8192)


def test_no_chunk_longer_than_the_prompt_is_tried() -> None:
    assert search(lambda settings: 1.0, prompt_tokens=1024, page_sizes=(16,))[1] == ["paths"]


def test_layer_groups_are_tried_with_compute_only() -> None:
    found, ran = search(
        lambda settings: 1.0 + (settings["pipeline"] == "8"), page_sizes=(16,), prompt_tokens=1, layer_ms=1
    )
    assert ran == ["paths", "layer groups"]
    assert found[0].settings() == {
        "path": "slice",
        "chunk_tokens": 8192,
        "pipeline": "on",
        "pipeline_group_size": 8,
    }
    assert [each.pipeline for each in found].count("off") == 2  # of either path; the repeated one is not listed twice


def test_settings_that_are_measured_again_count_with_their_new_figures() -> None:
    readings = itertools.count(10)
    (best, *others), _ = search(
        lambda settings: float(next(readings)) if settings["pipeline"] == "off" else 1.0,
        page_sizes=(16,), prompt_tokens=1, layer_ms=1,
    )  # fmt: skip
    assert (best.path, best.pipeline, best.rooms_per_s, best.recommended) == ("staged", "off", 12.0, True)
    assert [(each.path, each.recommended) for each in others if each.pipeline == "off"] == [("slice", False)]


def test_every_cp_mode_is_tried_and_the_best_is_kept() -> None:
    found, _ = search(lambda settings: 1.0 + (settings["cp_mode"] == "all"), cp_modes=("rank0", "all"))
    assert found[0].cp_mode == "all"
    assert found[0].settings()["cp_mode"] == "all"


def test_latency_decides_between_equal_rates() -> None:
    fast, slow = candidate(10.0, 1.0), candidate(10.2, 2.0)
    assert fast.better_than(slow, 1.05)
    assert not slow.better_than(fast, 1.05)


def test_settings_are_configuration_keys() -> None:
    assert candidate(ring_bytes=(64 << 20) + 1).settings() == {
        "path": "staged",
        "chunk_tokens": 8192,
        "staging_ring_mb": 65,
    }
    assert candidate(pipeline="on").settings()["pipeline"] == "on"


def test_hidden_transfer_is_known_with_compute_only() -> None:
    assert candidate().hidden_ratio is None
    assert candidate(layer_ms=1.0).hidden_ratio == 0.75
