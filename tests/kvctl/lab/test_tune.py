"""The search of `kvctl tune`: which benches it runs, and which candidate it recommends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvctl.lab.tune import Candidate, tune

Speed = Callable[[Mapping[str, Any]], float]


def candidate(rooms_per_s: float = 10.0, p50_ms: float = 5.0, off: float = 0.01, **changes: Any) -> Candidate:
    """Settings measured in four rounds, which are up to `off` below and above the figures."""
    factors = (1 - off, 1 - off / 2, 1 + off / 2, 1 + off)
    row = {
        "transport": "nixl",
        "ok": 8,
        "paths_taken": changes.pop("paths_taken", {}),
        "rounds": [
            {
                "rooms_per_s": rooms_per_s * factor,
                "gb_per_s": rooms_per_s * factor,
                "latency_ms": {"p50": p50_ms * factor},
            }
            for factor in factors
        ],
        "gb_per_s": rooms_per_s,
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


def search(
    speed: Speed, paths: Sequence[str] = ("slice", "staged"), paths_taken: Any = (), **changes: Any
) -> tuple[list[Candidate], list[str]]:
    """Runs a search in which `speed` decides the rooms per second from the settings."""
    ran: list[str] = []

    def measured(name: str, benches: Sequence[Mapping[str, Any]]) -> Iterator[Candidate]:
        ran.append(name)
        for options, mode in ((bench, mode) for bench in benches for mode in bench["cp_modes"]):
            for path in options.get("paths", paths):
                for pipeline in options.get("pipelines", ("off",)):
                    settings = {
                        "path": path,
                        "page_size": options["page_size"],
                        "chunk_tokens": options.get("chunk_tokens", 8192),
                        "cp_mode": mode if mode != "rank0" or len(options["cp_modes"]) > 1 else "",
                        "pipeline": pipeline,
                    }
                    yield candidate(speed(settings), paths_taken=dict(paths_taken), **settings)

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
    # In the order of the measurements, each compared with the settings that it took turns with.
    assert [(each.path, each.page_size, each.chunk_tokens, each.why) for each in others] == [
        ("slice", 16, 8192, "-91% rooms/s"),
        ("staged", 16, 8192, "-21% rooms/s"),
        ("staged", 32, 1024, "spreads overlap"),
        ("staged", 32, 8192, "-12% rooms/s"),
    ]


def test_nothing_is_better_while_the_spreads_overlap() -> None:
    wide, narrow = candidate(14.0, off=0.3), candidate(10.0)
    assert not wide.better_than(narrow, 1.05)
    assert candidate(14.0).better_than(narrow, 1.05)
    assert not candidate(14.0, 1.0, off=0.3).better_than(candidate(10.0, 1.2, off=0.3), 1.05)


def test_path_auto_stays_unless_another_is_better() -> None:
    (best, *_), _ = search(lambda settings: 10.0 + (settings["path"] == "staged"), paths=("slice", "staged", "auto"))
    assert best.path == "staged"
    (best, other, *_), _ = search(lambda settings: 10.0, paths=("slice", "staged", "auto"), page_sizes=(16,))
    assert (best.path, best.why, other.why) == ("auto", "none is shown to be better", "spreads overlap")


def test_the_path_that_auto_chose_is_the_same_choice() -> None:
    sent = {"staged": 8}
    (best, other), _ = search(
        lambda settings: 10.0 * (settings["path"] == "auto") + 9.9, paths=("staged", "auto"), page_sizes=(16,),
        prompt_tokens=1, paths_taken=sent,
    )  # fmt: skip
    assert best.path == "auto"
    assert other.why == "-50% rooms/s"  # the rounds tell them apart
    (_, other), _ = search(
        lambda settings: 10.0, paths=("staged", "auto"), page_sizes=(16,), prompt_tokens=1, paths_taken=sent
    )
    assert other.why == "= auto: it sent the same parts"


def test_equal_settings_leave_things_as_they_are() -> None:
    (best, *_), _ = search(lambda settings: 10.0 + (settings["page_size"] == 32) * 0.9)  # less than 10 %
    assert (best.path, best.page_size, best.chunk_tokens) == ("slice", 16, 8192)


def test_no_chunk_longer_than_the_prompt_is_tried() -> None:
    assert search(lambda settings: 1.0, prompt_tokens=1024, page_sizes=(16,))[1] == ["paths"]


def test_layer_groups_are_tried_with_compute_only() -> None:
    found, ran = search(
        lambda settings: 1.0 + (settings["pipeline"] == "8"), page_sizes=(16,), prompt_tokens=1, layer_ms=1
    )
    assert ran == ["paths", "layer groups"]
    assert found[0].settings() == {
        "transport": "nixl",
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
        "transport": "nixl",
        "path": "staged",
        "chunk_tokens": 8192,
        "staging_ring_mb": 65,
        "pipeline": "off",
    }
    assert candidate(pipeline="on").settings()["pipeline"] == "on"


def test_hidden_transfer_is_known_with_compute_only() -> None:
    assert candidate().hidden_ratio is None
    assert candidate(layer_ms=1.0).hidden_ratio == 0.75
