"""Totals of a fleet: nothing is counted twice, and unknown rates stay unknown."""

from __future__ import annotations

from typing import Any

from kvctl.render.report import Text
from kvctl.render.status import STATUS_LINES, Rates, rates, screen, status_line, summarise
from kvctl.render.terminal import stream_header, stream_line


def test_rooms_count_once_per_decode_instance_and_bytes_on_every_decode_rank(canned: Any) -> None:
    leader, follower = canned.status("decode-0"), canned.status("decode-1")
    follower["rank"] = {"dp": 0, "pp": 0, "cp": 0, "tp": 1, "unique": 1}
    summary = summarise([leader, follower, canned.status("prefill-0")])
    assert summary.active == {"Bootstrapping": 1, "WaitingForInput": 2, "Transferring": 3}
    assert summary.succeeded_total == 1204
    assert summary.bytes_total == 2 * (5 << 30)
    assert summary.counted == "decode"


def test_prefill_stands_in_where_no_decode_rank_answers(canned: Any) -> None:
    summary = summarise([canned.status("prefill-0"), canned.status("prefill-1")])
    assert summary.counted == "prefill"
    assert summary.bytes_total == 2 * (5 << 30)
    assert summary.succeeded_total == 1204
    assert summary.ring_ratio is None


def test_unknown_is_not_zero(canned: Any) -> None:
    idle = canned.status("decode-0")
    idle["rate"] |= {"gb_per_s": None, "rooms_per_s": None}
    idle["latency"] |= {"p50_ns": None, "p99_ns": None, "count": 0}
    summary = summarise([idle])
    assert (summary.gb_per_s, summary.rooms_per_s, summary.p50_ns, summary.p99_ns) == (None, None, None, None)


def test_rates_are_differences_over_the_wall_clock(canned: Any) -> None:
    before, after = canned.status("decode-0"), canned.status("decode-0")
    after["bytes_total"] += 3_000_000_000
    after["rooms_finished_total"] = {"Success": 1214, "Failed": 1}
    change = rates(summarise([before]), summarise([after]), 2_000_000_000)
    assert change == Rates(gb_per_s=1.5, succeeded_per_s=5.0, failed_per_s=0.5)


def test_a_restarted_or_lost_rank_gives_no_rate(canned: Any) -> None:
    one, two = summarise([canned.status("decode-0")]), summarise([canned.status(n) for n in canned.FLEET])
    restarted = canned.status("decode-0") | {"bytes_total": 1}
    assert rates(two, one, 10**9) == Rates()
    assert rates(one, two, 10**9) == Rates()
    assert rates(one, summarise([restarted]), 10**9) == Rates()


def test_a_line_of_the_watch_fits_every_terminal(canned: Any) -> None:
    busy = canned.status("decode-0")
    busy["rooms"] = {"Transferring": 9}
    summary = summarise([busy] * 128)
    row = status_line(summary, Rates(99.9, 12345.0, 99.9), canned.NOW, 12)
    line = stream_line(STATUS_LINES.columns, row, colour=False)
    assert len(stream_header(STATUS_LINES.columns)) == 78
    assert len(line) <= 80


def test_nobody_moves_nothing_is_not_a_rate() -> None:
    assert rates(summarise([]), summarise([]), 10**9) == Rates()


def headline(rows: list[dict[str, Any]], label: str) -> str:
    text = screen(rows, 0, [])[0]
    assert isinstance(text, Text)
    lines = ["".join(piece for piece, _ in line) for line in text.lines]
    return next(line for line in lines if line.startswith(label))


def test_instances_of_one_rank_are_single_ranks(canned: Any) -> None:
    rows = [canned.status("prefill-0"), canned.status("prefill-1")]
    for row in rows:
        row["sizes"] = dict.fromkeys(row["sizes"], 1)
    assert headline(rows, "prefill").startswith("prefill  2 ranks answered, ")
    assert headline(rows[:1], "prefill").startswith("prefill  1 rank answered, ")


def test_ranks_of_instances_of_several_shapes(canned: Any) -> None:
    rows = [canned.status("prefill-0"), canned.status("prefill-1")]
    rows[1]["sizes"] = dict.fromkeys(rows[1]["sizes"], 1)
    assert headline(rows, "prefill").startswith("prefill  2 of 3 ranks answered (one rank and tp2), ")


def test_ranks_that_do_not_answer_count_with_the_role_that_peers_know(canned: Any) -> None:
    rows = [canned.status("prefill-0"), canned.status("prefill-1")]
    silent = {"name": "prefill-2", "role": "prefill", "health": ["stopped"]}
    assert headline([*rows, silent], "prefill").startswith("prefill  2 of 3 ranks answered (tp2), ")
    assert headline([rows[0], silent], "prefill").startswith("prefill  1 of 2 ranks answered (tp2), ")
    for row in rows:
        row["sizes"] = dict.fromkeys(row["sizes"], 1)
    assert headline([*rows, silent], "prefill").startswith("prefill  2 of 3 ranks answered (one rank), ")
    assert headline([*rows, {"name": "other", "health": ["stopped"]}], "prefill").startswith(
        "prefill  2 ranks answered, "
    )


def test_rooms_that_only_prefill_ranks_have_are_told(canned: Any) -> None:
    rows = [canned.status(name) for name in canned.FLEET]
    assert headline(rows, "rooms").endswith(" failed   (at decode ranks)")
    for row in rows:
        row["rooms"] = {"Bootstrapping": 24} if row["role"] == "prefill" else {}
    assert headline(rows, "rooms").startswith("rooms    none active   2,408 done")
    assert headline(rows, "rooms").endswith("   (at decode ranks; prefill ranks have 24 active)")


def test_more_than_the_ring_has_is_granted_ahead(canned: Any) -> None:
    rank = canned.status("decode-0")
    rank["ring"] |= {"size_bytes": 4 << 20, "used_bytes": 6 << 20}
    assert "6 MiB of 4 MiB (150 %, the rest granted ahead)" in headline([rank], "ring")
