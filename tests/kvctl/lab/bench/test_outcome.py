"""The outcome of a whole bench: rows with simulated compute, several fleets, the terminal output."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from kvctl.lab.bench.results import Outcome, Results
from kvctl.lab.bench.trials import Case, Trial
from kvctl.lab.bench.variants import Variant
from kvctl.lab.bench.views import blocks, plan_rows, plan_table
from kvctl.lab.ranks.busy_loop import LoopTimes
from kvctl.lab.ranks.messages import Room
from kvctl.lab.ranks.request import PlanRequest, Sizes
from kvctl.render.report import Grid
from kvctl.render.selection import Selection, table_columns
from kvctl.render.terminal import render
from kvctl.render.view import Width
from tests.support.bench_plan import bench_plan, run_report

MS = 1_000_000


def plan(
    transport: str = "nixl",
    arrival_ms: float | None = None,
    prefix_tokens: int = 0,
    gpus: tuple[int, int] = (-1, -1),
    **shape: Any,
) -> Any:
    return bench_plan(
        [[0, 1]],
        {"prefix_tokens": prefix_tokens, "output_tokens": 5, "bytes": 1000, "arrival_ms": arrival_ms},
        {"layers": 8, **shape},
        transport=transport,
        device="cpu" if gpus[0] < 0 else "cuda",
        ranks=[{"role": role, "device": gpu} for role, gpu in zip(("prefill", "decode"), gpus, strict=True)],
        paths=["slice", "staged", "direct", "auto"],
        pipelines=["off", "on"],
    )


def trial(case: Case, latency_ms: int = 5, hidden: list[list[int]] | None = None) -> Trial:
    """Opened at 0, computed from 10 to 30 ms, decoded from success on, 2 ms a token."""
    success = (30 + latency_ms) * MS
    prefill = {
        "rooms": [[0, 10 * MS, 30 * MS, 0, 20 * MS]],
        "hidden": hidden or [],
        "groups": 1 if case.pipeline == "off" else 2,
        "counters": {"kvctl_pipeline_decisions_total": {"formula": 1.0}},
    }
    decode = {"rooms": [[0, 0, success, success, success + 8 * MS]]}
    reports: Any = {"prefill-0": run_report(**prefill), "decode-0": run_report(**decode)}
    room = Room(index=0, number=9, tokens=64, prefix_tokens=0, decode_dp=0, output_tokens=5)
    return Trial(case, 0, 0, (room,), reports)


def measured(*trials: Trial, label: str = "", transport: str = "nixl", **planned: Any) -> Results:
    made = plan(transport, **planned)
    names: Any = {f"{rank['role']}-0": rank for rank in made["ranks"]}
    request = PlanRequest((Sizes(),), Sizes(), loads=(), memory_bytes=0, seed=0, transport=transport)
    results = Results(Variant(label, request), made, names, "off")
    buffers = {"ring_bytes": 128, "pool_bytes": 0, "staging_bytes": 0, "transport": {}}
    gpu = {"name": "NVIDIA H200", "driver": "580", "cuda": "13.0"}
    ready: Any = {name: {**buffers, **({"gpu": gpu} if rank["device"] >= 0 else {})} for name, rank in names.items()}
    results.ready = ready
    for each in trials:
        results.add(each)
    return results


def outcome(*fleets: Results) -> Outcome:
    whole = Outcome()
    whole.measured += fleets
    return whole


def shown(whole: Outcome) -> str:
    made = blocks(whole.rows(), whole)
    plain = Selection(None, (), ())
    columns = [table_columns(each.view, plain, False) if isinstance(each, Grid) else () for each in made]
    return render(made, columns, 200, colour=False)


class TestRows:
    def test_times_of_a_simulated_serving_loop(self):
        (row,) = outcome(measured(trial(Case(0, "staged", "on", 2.5), hidden=[[0, 7 * MS, 5 * MS]]))).rows()
        assert row["compute_ms"]["p50"] == 20
        assert row["total_ms"]["p50"] == 25
        assert row["exposed_ms"]["p50"] == row["latency_ms"]["p50"] == 5
        assert row["hidden_ms"]["p50"] == 7
        assert row["ttft_ms"]["p50"] == 35  # from arrival, with the wait for the forward
        assert row["tpot_ms"]["p50"] == 2
        assert (row["groups"], row["pipeline"], row["layer_ms"]) == (2, "on", 2.5)
        assert row["pipeline_decisions"] == {"formula": 1}

    def test_what_decode_had_cached_is_a_part_of_all_prompts(self):
        (row,) = outcome(measured(trial(Case(0, "staged")), prefix_tokens=16)).rows()
        assert row["prefix_hit_ratio"] == 0.25

    def test_requests_with_arrivals_are_an_open_loop(self):
        rows = [outcome(measured(trial(Case(0, "staged")), arrival_ms=at)).rows()[0] for at in (None, 3.0)]
        assert [row["arrivals"] for row in rows] == ["closed", "open"]


class TestSeveralFleets:
    def test_rows_of_one_load_are_held_against_the_first_fleets(self):
        slow = measured(trial(Case(0, "slice"), 45), label="nixl")
        fast = measured(trial(Case(0, "slice"), 5), label="loopback", transport="loopback")
        first, second = outcome(slow, fast).rows()
        assert (first["transport"], first["delta_ratio"]) == ("nixl", None)
        assert (second["transport"], second["delta_ratio"]) == ("loopback", pytest.approx(65 / 25 - 1))
        assert second["ttft_delta_ratio"] == pytest.approx(35 / 75 - 1)

    def test_floors_are_the_best_of_each_transport(self):
        fleets = [measured(label=each, transport=each) for each in ("nixl", "nixl", "loopback")]
        for number, each in enumerate(fleets):
            each.roofline["write"].append(float(number))
            each.roofline["memcpy"].append(10.0 * number)
        document = outcome(*fleets).document()
        assert document["floors"]["transport_write_gb_per_s"] == 1.0
        assert document["floors"]["write_gb_per_s_by_transport"] == {"nixl": 1.0, "loopback": 2.0}
        assert document["floors"]["memcpy_gb_per_s"] == 20.0

    def test_trouble_names_the_fleet(self):
        broken = trial(Case(0, "staged"))
        broken.reports["decode-0"]["failures"].append([0, "decode-0: lost its peer"])
        assert outcome(measured(broken)).problems == ["1 room failed: decode-0: lost its peer"]
        both = outcome(measured(broken, label="all"), measured(label="rank0"))
        assert both.problems == ["all: 1 room failed: decode-0: lost its peer"]


class TestPicture:
    def test_a_plain_bench_says_nothing_of_what_it_did_not_do(self):
        text = shown(outcome(measured(replace(trial(Case(0, "staged"))))))
        assert not any(word in text for word in ("compute", "hidden", "layer groups", "prefix hits", "arriving"))

    def test_a_simulated_one_does(self):
        case = Case(0, "staged", "on", 2.5)
        text = shown(outcome(measured(trial(case, hidden=[[0, 7 * MS, 0]]), prefix_tokens=16, arrival_ms=0.0)))
        assert "arriving in an open loop" in text
        lines = {
            line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1].strip()
            for line in text.splitlines()
            if "  " in line
        }
        assert lines["TTFT mean"] == "35 ms"
        assert lines["TPOT mean"] == "2 ms"
        assert lines["hidden behind it, mean"] == "7 ms"
        assert lines["layer groups"] == "2"
        assert lines["decided by"] == "formula"
        assert lines["prefix hits"] == "25 %"

    def test_many_contestants_have_a_line_each_with_what_sets_them_apart(self):
        fleets = [
            measured(trial(Case(0, "slice")), trial(Case(0, "staged")), label=each, transport=each)
            for each in ("nixl", "loopback", "mooncake")
        ]
        text = shown(outcome(*fleets))
        header = next(line for line in text.splitlines() if "PATH" in line)
        assert "TRANSPORT" in header
        assert "PIPELINE" not in header
        assert text.count("mooncake") == 2 + 2  # two lines, the headline and the floors

    @pytest.mark.parametrize(
        ("shape", "text"),
        [
            ({}, "8 layers, 2 KV heads of 8 bf16"),
            ({"v_head_dim": 4}, "8 layers, 2 KV heads of 8 and 4 bf16"),
            ({"kind": "mla", "head_dim": 576, "v_head_dim": 0}, "8 layers, latents of 576 bf16"),
            (
                {"model": "m", "draft": {"layers": 1}, "states": [{"name": "conv"}]},
                "m: 8 layers, 2 KV heads of 8 bf16, 1 draft layer, state conv",
            ),
            (
                {"groups": [{"name": "swa", "layers": [0, 4], "page_size": 16, "window": 64}]},
                "8 layers, 2 KV heads of 8 bf16, KV group swa (2 layers, pages of 16, window 64)",
            ),
        ],
    )
    def test_the_headline_tells_the_shape(self, shape: dict[str, Any], text: str):
        assert f"· {text} ·" in shown(outcome(measured(trial(Case(0, "staged")), **shape)))


class TestBusyEngine:
    """The loop of a busy engine beside rooms, against the same loop beside an idle agent."""

    CASE = Case(0, "staged", busy_engine="prefill")

    def busy(self) -> Trial:
        plain = trial(self.CASE, 30)
        loop = LoopTimes(
            iterations=100, ns=20_000_000, undisturbed_ns=5_000_000, longest_ns=9_000_000, longest_call_ns=3_000_000
        )
        idle = LoopTimes(
            iterations=200, ns=11_000_000, undisturbed_ns=11_000_000, longest_ns=100_000, longest_call_ns=0
        )
        reports: Any = {name: {**report, "loop": loop} for name, report in plain.reports.items() if "prefill" in name}
        return replace(plain, reports={**plain.reports, **reports}, idle_loops=[dict.fromkeys(reports, idle)] * 2)

    def test_is_compared_with_the_idle_loop(self) -> None:
        (row,) = outcome(measured(self.busy())).rows()
        assert row["engine_slowdown_ratio"] == pytest.approx(0.75)
        assert (row["engine_stall_ms"], row["engine_idle_stall_ms"], row["engine_call_ms"]) == (9.0, 0.1, 3.0)

    def test_has_lines_in_the_table(self) -> None:
        text = shown(outcome(measured(trial(Case(0, "staged"), 30), self.busy())))
        assert "engine's loop slowed down by" in text
        assert re.search(r"its longest stall +- +9 ms", text)
        assert re.search(r"engine idle +.*busy prefill", text, re.IGNORECASE)

    def test_a_loop_without_rooms_is_not_busy(self) -> None:
        (row,) = outcome(measured(trial(Case(0, "staged")))).rows()
        assert row["busy_engine"] == "off"
        assert row["engine_slowdown_ratio"] is None


class TestOnGpus:
    """Floors, copies and compute of GPUs: what rows, captions and the saved document say of them."""

    PATHS = ("slice", "staged", "direct", "auto")

    def fleet(self, peer: float | None = 2.0, gpus: tuple[int, int] = (0, 1), **planned: Any) -> Results:
        trials = [trial(Case(0, path), latency) for path, latency in zip(self.PATHS, (40, 4, 2, 2), strict=True)]
        fleet = measured(*trials, gpus=gpus, **planned)
        floors = {"write": 3.0, "device": 5.0, **({"peer": peer} if peer else {})}
        for kind, figure in floors.items():
            fleet.roofline[kind].append(figure)
        return fleet

    def test_a_rooms_latency_is_held_against_one_copy_of_as_many_bytes(self):
        rows = outcome(self.fleet(peer=2e-3)).rows()  # 1,000 bytes at 2e-3 GB/s: 0.5 ms
        assert [row["floor_ratio"] for row in rows] == pytest.approx([80, 8, 4, 4])
        assert {row["device"] for row in rows} == {"cuda"}
        assert rows[2]["p2p_ratio"] == pytest.approx(rows[2]["gb_per_s"] / 2e-3)
        assert rows[2]["device_copy_ratio"] == pytest.approx(rows[2]["gb_per_s"] / 5)
        assert rows[2]["memcpy_ratio"] is None

    @pytest.mark.parametrize(("gpus", "floor_ms"), [((0, 0), 2e-4), ((0, 1), None)])
    def test_without_a_mapping_a_gpu_has_its_own_copy_and_two_have_none(
        self, gpus: tuple[int, int], floor_ms: float | None
    ):
        row = outcome(self.fleet(None, gpus)).rows()[0]
        assert row["floor_ratio"] == (pytest.approx(40 / floor_ms) if floor_ms else None)

    def test_on_hosts_there_is_no_such_floor(self):
        assert outcome(self.fleet(gpus=(-1, -1))).rows()[0]["floor_ratio"] is None

    def test_the_document_has_the_floors_and_the_gpus(self):
        document = outcome(self.fleet()).document()
        assert document["floors"]["memcpy_gb_per_s"] is None
        assert document["floors"]["transport_write_gb_per_s"] == 3
        assert (document["floors"]["device_copy_gb_per_s"], document["floors"]["p2p_gb_per_s"]) == (5, 2)
        assert document["env"]["device"] == "0: NVIDIA H200, 1: NVIDIA H200"
        assert (document["env"]["driver"], document["env"]["cuda"]) == ("580", "13.0")
        assert {"triton", "cuda_bindings"} <= set(document["env"])

    def test_rooms_that_there_was_no_time_for_are_told(self):
        fleet = measured(trial(Case(0, "slice")), gpus=(0, 1))
        fleet.plan["loads"][0]["batches"] = [[0, 1], [1, 9]]
        assert "rooms left out because of --point-seconds: slice 1 of 9 in 1 run" in shown(outcome(fleet))


def test_a_plan_on_gpus_tells_which_rank_is_where():
    share = {"instance": 0, "writer": 0, "reader": 0, "segment": "kv", "stripe": None, "splits": [1, 1]}
    ranks = [{"instance": 0, "unique": 0, "device": 0}, {"instance": -1, "unique": 0, "device": 1}]
    planned: Any = {"shares": [share], "ranks": ranks}
    (row,) = rows = plan_rows(planned, "")
    assert (row["writer"], row["writer_gpu"], row["reader_gpu"]) == ("prefill-0", 0, 1)
    assert [column.name for column in plan_table(rows).columns if column.width is Width.CORE][:4] == [
        "writer",
        "writer_gpu",
        "reader",
        "reader_gpu",
    ]
    planned["ranks"] = [{**rank, "device": -1} for rank in ranks]
    rows = plan_rows(planned, "")
    assert rows[0]["writer_gpu"] is None
    assert "direct" not in [column.name for column in plan_table(rows).columns if column.width is Width.CORE]
