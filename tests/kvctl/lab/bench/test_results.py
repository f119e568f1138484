"""From the ranks' reports to the rows that are printed and saved."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.lab.bench.results import Outcome, Results
from kvctl.lab.bench.room_timing import time_rooms
from kvctl.lab.bench.rows import with_delta
from kvctl.lab.bench.trials import Case, Trial
from kvctl.lab.bench.variants import Variant
from kvctl.lab.bench.views import BENCH, blocks
from kvctl.lab.ranks.messages import Mismatch, Room, RunReport, VerifyReport
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.request import PlanRequest, Sizes
from kvctl.render.data import tsv
from kvctl.render.terminal import render
from tests.support.bench_plan import bench_plan, run_report

MS = 1_000_000
GB = 10**9
VARIANT = Variant("", PlanRequest((Sizes(),), Sizes(), loads=(), memory_bytes=0, seed=0))
NAMES: Any = {f"{role}-{rank}": {"role": role, "device": -1} for role in ("prefill", "decode") for rank in range(2)}


def plan(paths: tuple[str, ...] = ("slice", "staged")) -> Plan:
    room = {"prefix_tokens": 16, "bytes": GB // 10}
    made: Plan = bench_plan([[0, 2], [2, 4]], room, {"model": "m"}, paths=list(paths))
    return made


def room(index: int) -> Room:
    return Room(index=index, number=900 + index, tokens=64, prefix_tokens=0, decode_dp=index % 2)


def report(rooms: list[list[int]], failures: list[list[Any]] | None = None, **changes: Any) -> RunReport:
    common = {"rooms": rooms, "failures": failures or [], "cpu_ns": 500 * MS, "peak_rss_bytes": 300 << 20}
    made: RunReport = run_report(**{**common, **changes})
    return made


def received(index: int, opened_ns: int, success_ns: int) -> list[int]:
    """Of a decode rank: nothing is decoded, so the tokens come with success."""
    return [index, opened_ns, success_ns, success_ns, success_ns]


def trial(
    path: str = "staged",
    batch: int = 0,
    at_ms: int = 0,
    took_ms: int = 50,
    repeat: int = 0,
    sent: str = "",
    **changes: Any,
) -> Trial:
    """Two rooms, one for each decode rank; the second starts when the first is half through.

    All parts go by path `sent`, by default by the path of the case.
    """
    chosen, path = path, sent or path
    first, second = 2 * batch, 2 * batch + 1
    start = at_ms * MS
    half = took_ms * MS // 2
    moved = {
        "kvctl_descriptors_total": {path: 64.0},
        "kvctl_writes_total": {path: 2.0},
        "kvctl_engine_posts_total": {path: 6.0},
        "kvctl_parts_total": {path: 2.0},
    }
    reports = {}
    for rank, (index, at) in enumerate(((first, start), (second, start + half))):
        begun = start + rank * MS
        sent_rooms = [[first, begun, begun + MS, 0, MS], [second, start + half, start + half + MS, 0, MS]]
        reports[f"prefill-{rank}"] = report(sent_rooms, counters=moved)
        ended = received(index, at - MS, at + took_ms * MS)
        reports[f"decode-{rank}"] = report([ended], counters={"kvctl_parts_total": {path: 2.0}})
    reports.update(changes.pop("reports", {}))
    clean = VerifyReport(rooms=1, bytes=1, mismatches=[], bad_rooms=[])
    verdicts = {"decode-0": clean, "decode-1": clean, **changes.pop("verdicts", {})}
    return Trial(Case(0, chosen), batch, repeat, (room(first), room(second)), reports, verdicts)


def results(*trials: Trial, verify: str = "full", paths: tuple[str, ...] = ("slice", "staged")) -> Results:
    collected = Results(VARIANT, plan(paths), NAMES, verify)
    for each in trials:
        collected.add(each)
    return collected


def outcome(*several: Results, **changes: Any) -> Outcome:
    collected = Outcome()
    for number, each in enumerate(several):
        request = PlanRequest(
            prefill=(Sizes(tp=2),),
            decode=Sizes(dp=2),
            loads=(),
            memory_bytes=0,
            seed=0,
            transport=("nixl", "mooncake")[number],
        )
        label = request.transport if len(several) > 1 else ""
        each.variant = Variant(label, request)
        collected.measured.append(each)
    return collected


def test_a_room_starts_with_its_first_writer_and_ends_with_its_last_reader():
    joined = time_rooms(trial(took_ms=50), NAMES, dict.fromkeys(range(4), 7))
    timing = joined.timings[0]
    assert (timing.opened_ns, timing.started_ns) == (-MS, 0)
    assert timing.forward_done_ns == 2 * MS
    assert timing.success_ns == 50 * MS
    assert timing.latency_ns == 48 * MS
    assert timing.nbytes == 7


def test_a_room_that_failed_anywhere_has_no_timing():
    broken = trial(reports={"decode-1": report([], [[1, "decode-1: lost its peer"]])})
    joined = time_rooms(broken, NAMES, dict.fromkeys(range(4), 7))
    assert list(joined.timings) == [0]
    assert joined.failures == {1: "decode-1: lost its peer"}


def test_a_room_that_nobody_reported_did_not_succeed():
    joined = time_rooms(trial(reports={"decode-1": report([])}), NAMES, dict.fromkeys(range(4), 7))
    assert joined.failures == {1: "no rank reported its end"}


def test_rates_are_over_the_time_in_which_rooms_were_under_way():
    rows = results(trial(batch=0, at_ms=0, took_ms=50), trial(batch=1, at_ms=9000, took_ms=50)).rows()
    (row,) = rows
    # Each batch lasts 75 ms; the nine seconds between them are nobody's.
    assert row["seconds"] == pytest.approx(0.150)
    assert row["rooms_per_s"] == pytest.approx(4 / 0.150)
    assert row["gb_per_s"] == pytest.approx(0.4 / 0.150)
    assert row["gb_per_s_per_decode_rank"] == pytest.approx(0.2 / 0.150)


def test_costs_are_per_room_and_summed_over_ranks():
    (row,) = results(trial()).rows()
    assert row["writes_per_room"] == 2
    assert row["descriptors_per_room"] == 64
    assert row["engine_posts_per_room"] == 6
    assert row["cpu_seconds"] == 2.0
    assert row["paths_taken"] == {"staged": 4}
    assert row["verified_parts"] == 4


def test_the_ring_counts_only_where_something_was_staged():
    full = {
        "decode-0": report(
            [received(0, 0, MS)], ring_high_water_bytes=77, counters={"kvctl_parts_total": {"staged": 1.0}}
        )
    }
    assert results(trial(reports=full)).rows()[0]["ring_high_water_bytes"] == 77
    idle = {"decode-0": report([received(0, 0, MS)], ring_high_water_bytes=77)}
    assert results(trial("slice", reports=idle)).rows()[0]["ring_high_water_bytes"] == 0


def test_memory_beyond_the_ranks_own_buffers_is_shown():
    collected = results(trial())
    ready: Any = {"pool_bytes": 100 << 20, "ring_bytes": 50 << 20, "staging_bytes": 0}
    collected.ready = {"decode-0": ready}
    assert collected.rows()[0]["rss_overhead_bytes"] == 150 << 20


def test_the_middle_repeat_is_reported():
    (row,) = results(*(trial(repeat=number, took_ms=ms) for number, ms in enumerate((40, 100, 60)))).rows()
    assert row["repeats"] == 3
    assert row["seconds"] == pytest.approx(0.090)


def test_ratios_are_to_the_best_floor_seen():
    collected = results(trial())
    collected.roofline["memcpy"] += [5.0, 10.0]
    (row,) = collected.rows()
    assert row["memcpy_ratio"] == pytest.approx(row["gb_per_s"] / 10)
    assert row["write_ratio"] is None


WRONG = Mismatch(room=901, where="layer 3 V token 17 head 1 dim 5", expected="aa", found="bb", hint="never written")


def test_one_wrong_byte_spoils_the_result_and_is_told():
    spoiled = VerifyReport(rooms=1, bytes=1, mismatches=[WRONG], bad_rooms=[1])
    collected = results(trial("slice"), trial("staged", verdicts={"decode-1": spoiled}))
    assert [row["verified"] for row in collected.rows()] == [True, False]
    assert collected.verified is False
    assert collected.problems == ["room 901 layer 3 V token 17 head 1 dim 5: expected aa, found bb (never written)"]


def test_a_failed_room_spoils_the_result_and_is_told():
    collected = results(trial(reports={"decode-1": report([], [[1, "decode-1: lost its peer"]])}))
    assert (collected.rows()[0]["failed"], collected.verified) == (1, False)
    assert collected.problems == ["1 room failed: decode-1: lost its peer"]


def test_what_nobody_looked_at_is_not_verified():
    collected = results(trial(), verify="off")
    assert collected.verified is None
    assert outcome(collected).document()["verified"] is None
    assert "nothing was verified" in on_terminal(collected)


def test_a_bench_that_was_cut_short_before_its_first_trial_has_no_rows():
    assert results().rows() == []
    assert results().verified is None
    assert outcome(results()).rows() == []
    assert outcome(results()).verified is None


def test_tsv_has_a_line_per_run_in_machine_units():
    rows = with_delta(results(trial("slice", took_ms=100), trial("staged", took_ms=50)).rows())
    header, slow, fast = (line.split("\t") for line in tsv(BENCH.columns, rows).splitlines())
    assert (slow[0], fast[0]) == ("slice", "staged")
    assert fast[header.index("delta_ratio")] == "1.0"
    assert slow[header.index("delta_ratio")] == ""
    # (2 → 50) and (26 → 75): 48 and 49 ms
    assert fast[header.index("p50_ns")] == str(48 * MS + MS // 2)


def test_rows_are_compared_with_the_first_of_their_load_and_compute():
    def row(gb_per_s: float, concurrency: int = 4, ttft: float | None = 1.0, layer_ms: float = 0.0) -> dict[str, Any]:
        load = {"concurrency": concurrency, "tokens_drawn": "64", "layer_ms": layer_ms}
        return {"path": "staged", "gb_per_s": gb_per_s, "ttft_ms": {"mean": ttft}, **load}

    rows = with_delta(
        [row(2), row(4, 8), row(3, ttft=0.25), row(2, 8, None), row(5, layer_ms=5.0), row(0, 1), row(3, 1)]
    )
    found = [(each["delta_ratio"], each["ttft_delta_ratio"]) for each in rows]
    nothing = (None, None)
    assert found == [nothing, (0.5, -0.75), nothing, (-0.5, None), nothing, nothing, (None, 0.0)]


def rounds(path: str, *took_ms: int, sent: str = "") -> list[Trial]:
    return [trial(path, took_ms=each, repeat=number, sent=sent) for number, each in enumerate(took_ms)]


def on_terminal(collected: Results) -> str:
    whole = outcome(collected)
    made = blocks(whole.rows(), whole)
    columns = [(getattr(block, "view", None) and block.view.columns) or () for block in made]  # type: ignore[union-attr]
    return render(made, columns, 80, colour=False)


def test_people_see_a_column_per_path_with_the_difference():
    collected = results(*rounds("slice", 100, 100, 101, 102), *rounds("staged", 50, 50, 51, 52))
    collected.roofline["memcpy"].append(14.6)
    text = on_terminal(collected)
    assert "prefill tp2 → decode dp2 over nixl · m: 2 layers, 2 KV heads of 8 bf16" in text
    assert any(line.split() == ["GB/s", "1.32", "2.67", "+102%"] for line in text.splitlines())
    assert "memcpy 14.6 GB/s on one thread, one write over nixl - GB/s" in text
    assert "every byte verified" in text
    assert "hidden" not in text
    assert any(line.split() == ["rooms/s", "by", "round", "13.1-13.3", "25.6-26.7"] for line in text.splitlines())
    assert "Δ over 4 rounds in turns: ≈ where their spreads overlap\n" in text


def test_no_difference_is_shown_where_the_spreads_overlap():
    text = on_terminal(results(*rounds("slice", 40, 50, 60, 70), *rounds("staged", 30, 35, 38, 41)))
    assert any(line.split() == ["GB/s", "2.67", "3.51", "≈"] for line in text.splitlines())
    assert "+" not in text


def test_a_difference_after_too_few_rounds_is_marked():
    text = on_terminal(results(*rounds("slice", 100, 101), *rounds("staged", 50, 51)))
    assert any(line.split() == ["GB/s", "1.32", "2.67", "+102%?"] for line in text.splitlines())
    assert "Δ over 2 rounds in turns: ? below 4 rounds, where it may be chance: --repeat 4\n" in text


def test_a_path_that_auto_chose_and_auto_are_one_column():
    collected = results(
        *rounds("slice", 100, 100, 101, 102),
        *rounds("staged", 50, 50, 51, 52),
        *rounds("auto", 45, 48, 51, 70, sent="staged"),
        paths=("slice", "staged", "auto"),
    )
    rows = outcome(collected).rows()
    assert [row["same_as"] and row["same_as"]["path"] for row in rows] == [None, None, "staged"]
    assert [column.human(rows[2]) for column in BENCH.columns if column.name == "delta"] == ["= staged"]
    text = on_terminal(collected)
    assert "auto" not in text.split("GB/s")[0]
    assert "auto = staged: it sent the same parts on the same path, at 19-29.6 rooms/s\n" in text


@pytest.mark.parametrize(
    ("took_ms", "sent"),
    [((45, 48, 51, 70), "slice"), ((20, 21, 22, 23), "staged")],
    ids=["it chose another path", "the rounds tell it apart"],
)
def test_auto_keeps_its_column_otherwise(took_ms: tuple[int, ...], sent: str):
    whole = [*rounds("staged", 50, 50, 51, 52), *rounds("auto", *took_ms, sent=sent)]
    rows = outcome(results(*whole, paths=("staged", "auto"))).rows()
    assert [row["same_as"] for row in rows] == [None, None]


def test_a_row_has_the_figures_of_each_round():
    (row,) = results(*rounds("staged", 50, 100)).rows()
    assert [each["rooms_per_s"] for each in row["rounds"]] == pytest.approx([26.67, 13.33], abs=0.01)
    assert {"gb_per_s", "latency_ms", "ttft_ms", "cpu_seconds"} <= set(row["rounds"][0])
