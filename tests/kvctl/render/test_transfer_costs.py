"""Rows of `kvctl peers cost`: groups of ranks, and how the answers of their ranks are combined."""

from __future__ import annotations

from typing import Any

from kvctl.render.transfer_costs import RankCost, cost_rows, scaled

MS = 1_000_000


def rank(name: str, index: int = 0, *, dp: int = 1, tp: int = 1, accepting: bool = True, **cost: Any) -> RankCost:
    role = name.rpartition("-")[0].removeprefix("p1-")
    coordinates = {"dp": index // tp, "pp": 0, "cp": 0, "tp": index % tp, "unique": index}
    status = {"name": name, "role": role, "rank": coordinates, "sizes": {"dp": dp, "pp": 1, "cp": 1, "tp": tp}}
    answer = {"role": role, "accepting": accepting, "tokens": 100, "ring": None, "ahead_ns": 0, "costs": [], **cost}
    return RankCost(name, status, answer)


def cost(peer: str, alone_ms: float | None = None, *, basis: str = "rooms", **changes: Any) -> dict[str, Any]:
    alone = None if alone_ms is None else round(alone_ms * MS)
    return {
        "peer": peer,
        "state": "ready",
        "rooms": 0,
        "queued_bytes": 0,
        "bytes": 100_000,
        "bytes_per_token": 1000.0,
        "path": "bulk",
        "fixed_ns": None if alone is None else 0,
        "bytes_per_s": None if alone is None else round(100_000 / alone * 1e9),
        "alone_ns": alone,
        "predicted_ns": alone,
        "basis": None if alone is None else basis,
        "samples": 9,
        "age_ns": 0,
        "error_ratio": 0.1,
        "reason": None if alone is not None else f"{peer} is new",
        **changes,
    }


def ring(size: int, used: int) -> dict[str, int]:
    return {"size_bytes": size, "used_bytes": used}


def test_the_last_writer_to_end_its_forward_and_the_slowest_reader_count() -> None:
    ranks = [
        rank("prefill-0", 0, tp=2, costs=[cost("decode-0", 5), cost("decode-1", 6, rooms=2, queued_bytes=10)]),
        rank("prefill-1", 1, tp=2, costs=[cost("decode-0", 9), cost("decode-1", 8, rooms=1, queued_bytes=20)]),
        rank("decode-0", 0, tp=2, ring=ring(100, 30)),
        rank("decode-1", 1, tp=2, ring=ring(100, 60)),
    ]
    (row,) = cost_rows(ranks, 100)
    assert (row["prefill"], row["decode"]) == ("prefill", "decode")
    assert row["alone_ns"] == 6 * MS
    assert (row["rooms"], row["queued_bytes"], row["headroom_bytes"]) == (2, 30, 40)
    assert (row["prefill_ranks"], row["decode_ranks"]) == (["prefill-0", "prefill-1"], ["decode-0", "decode-1"])
    assert len(row["ranks"]) == 4
    assert row["reason"] is None


def test_dp_groups_are_rows_of_their_own() -> None:
    ranks = [
        rank("prefill-0", costs=[cost("decode-0", 1), cost("decode-1", 2)]),
        rank("decode-0", 0, dp=2),
        rank("decode-1", 1, dp=2),
    ]
    rows = cost_rows(ranks, 100)
    assert [(row["prefill"], row["decode"], row["alone_ns"]) for row in rows] == [
        ("prefill-0", "decode dp0", MS),
        ("prefill-0", "decode dp1", 2 * MS),
    ]


def test_a_rank_without_a_prediction_leaves_the_pair_without_one() -> None:
    ranks = [
        rank("prefill-0", costs=[cost("decode-0"), cost("decode-1", 2)]),
        *(rank(f"decode-{number}", number, tp=2) for number in range(2)),
    ]
    (row,) = cost_rows(ranks, 100)
    assert (row["predicted_ns"], row["basis"], row["reason"]) == (None, None, "decode-0 is new")


def test_a_decode_rank_that_does_not_answer_is_shown_by_its_name() -> None:
    (row,) = cost_rows([rank("prefill-0", costs=[cost("decode-7", 1, state="suspect")])], 100)
    assert (row["decode"], row["state"], row["headroom_bytes"]) == ("decode-7", "suspect", None)


def test_who_drains_is_named() -> None:
    (row,) = cost_rows([rank("prefill-0", costs=[cost("decode-0", 1)]), rank("decode-0", accepting=False)], 100)
    assert (row["accepting"], row["reason"]) == (False, "decode-0 accepts no new rooms")


def test_staged_bytes_are_divided_over_the_rings() -> None:
    costs = [cost(f"decode-{number}", 1, path="staged") for number in range(2)]
    ranks = [rank("prefill-0", costs=costs), *(rank(f"decode-{number}", number, tp=2) for number in range(2))]
    (row,) = cost_rows(ranks, 100)
    assert row["staged_bytes"] == 50_000


def test_a_recorded_answer_is_computed_for_another_length() -> None:
    answer = {"tokens": 100, "ahead_ns": 30 * MS}
    row = cost("decode-0", 10, fixed_ns=2 * MS, bytes_per_s=12_500_000)
    assert scaled(answer, row, 100) is row
    found = scaled(answer, row, 200)
    assert (found["bytes"], found["alone_ns"]) == (200_000, 18 * MS)
    assert found["predicted_ns"] == 48 * MS
    assert scaled(answer, cost("decode-0"), 200)["predicted_ns"] is None


def test_no_prefill_rank_no_rows() -> None:
    assert cost_rows([rank("decode-0")], 100) == []


def test_two_prefill_instances_have_a_row_each() -> None:
    ranks = [
        rank("prefill-0", costs=[cost("decode-0", 1)]),
        rank("p1-prefill-0", costs=[cost("decode-0", 4)]),
        rank("decode-0"),
    ]
    assert [(row["prefill"], row["alone_ns"]) for row in cost_rows(ranks, 100)] == [
        ("prefill-0", MS),
        ("p1-prefill-0", 4 * MS),
    ]
