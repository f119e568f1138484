"""Groups of a large fleet: a dozen lines while it is healthy, the odd ones first when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvctl.render.groups import By, groups, oddities, placed, table
from kvctl.render.selection import find_column
from kvctl.render.view import Row

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def ranks(canned: Any) -> Callable[..., list[dict[str, Any]]]:
    """`ranks(hosts)`: statuses of hosts with eight ranks each, prefill and decode in turn."""

    def make(hosts: int = 128) -> list[dict[str, Any]]:
        found = []
        for host in range(hosts):
            role = ("prefill", "decode")[host % 2]
            for tp in range(8):
                found.append(
                    canned.status(f"{role}-{tp}")
                    | {
                        "name": f"{role}-{tp}@n{host}",
                        "host": f"n{host}",
                        "rank": {"dp": 0, "pp": 0, "cp": 0, "tp": tp, "unique": tp},
                        "sizes": {"dp": 1, "pp": 1, "cp": 1, "tp": 8},
                        "registry": f"tcp://10.0.0.{host}:4999" if role == "prefill" else None,
                        "device": f"cuda:{tp}",
                        "health": [],
                    }
                )
        return found

    return make


def silent(name: str, host: str) -> dict[str, Any]:
    return {"name": name, "host": host, "health": ["timeout"]}


def lines(rows: list[dict[str, Any]], by: By | None = None) -> list[tuple[Any, ...]]:
    grid = table(placed(rows), by)
    columns = [find_column(grid.view, name) for name in ("group", "hosts", "up", "health")]
    return [tuple([column.value(line) for column in columns]) for line in grid.rows]


def test_a_healthy_fleet_is_two_lines(ranks: Any) -> None:
    assert lines(ranks()) == [
        ("64 instances, tp8", "64 hosts", "512 of 512", "ok"),
        ("64 instances, tp8", "64 hosts", "512 of 512", "ok"),
    ]


def test_few_instances_are_listed(ranks: Any) -> None:
    assert lines(ranks(4)) == [
        ("decode@n1", "n1", "8 of 8", "ok"),
        ("decode@n3", "n3", "8 of 8", "ok"),
        ("prefill@n0", "n0", "8 of 8", "ok"),
        ("prefill@n2", "n2", "8 of 8", "ok"),
    ]


def test_odd_groups_come_first_with_their_odd_ranks(ranks: Any) -> None:
    rows = ranks()
    by_name: dict[str, dict[str, Any]] = {row["name"]: row for row in rows}
    by_name["decode-3@n5"]["health"] = ["KV_LANE_SLOW"]
    by_name["prefill-1@n2"]["draining"] = True
    rows = [row for row in rows if row["name"] != "decode-1@n7" and row["host"] != "n17"]
    rows += [silent(f"10.0.0.17:{port}", "n17") for port in range(7000, 7008)]
    assert lines(rows) == [
        ("host n17", "n17", "0 of 8", "silent"),
        ("decode@n5", "n5", "8 of 8", "KV_LANE_SLOW (1)"),
        ("└ decode-3@n5", "n5", None, "KV_LANE_SLOW"),
        ("decode@n7", "n7", "7 of 8", "1 missing"),
        ("prefill@n2", "n2", "8 of 8", "draining (1)"),
        ("└ prefill-1@n2", "n2", None, "draining"),
        ("63 instances, tp8", "63 hosts", "504 of 504", "ok"),
        ("61 instances, tp8", "61 hosts", "488 of 488", "ok"),
    ]


def test_many_odd_instances_of_one_kind_are_one_line(ranks: Any) -> None:
    rows = ranks()
    for row in rows:
        if row["role"] == "decode":
            row["health"] = ["KV_COMPAT_MISMATCH"]
    assert lines(rows) == [
        ("decode@n1, decode@n3 and 62 more", "64 hosts", "512 of 512", "KV_COMPAT_MISMATCH each"),
        ("64 instances, tp8", "64 hosts", "512 of 512", "ok"),
    ]


@pytest.mark.parametrize("by", [None, *By])
def test_a_fleet_in_which_every_host_is_odd_in_its_own_way_still_fits_a_screen(ranks: Any, by: By | None) -> None:
    rows = ranks()
    for number, row in enumerate(rows):
        row["health"] = [f"KV_{number}"]
    shown = lines(rows, by)
    assert len(shown) <= 24 or by in {By.HOST, By.INSTANCE}
    assert len(lines(rows)) == 13
    assert lines(rows)[-1][0] == "and 116 more (--by instance)"


def test_a_host_line_counts_its_silent_agents(ranks: Any) -> None:
    rows = [row for row in ranks(2) if row["name"] != "decode-7@n1"] + [silent("10.0.0.1:7", "n1")]
    assert lines(rows, By.HOST) == [
        ("host n1", "n1", "7 of 8", "1 silent"),
        ("└ 10.0.0.1:7", "n1", None, "silent, timeout"),
        ("host n0", "n0", "8 of 8", "ok"),
    ]


def change_version(row: dict[str, Any]) -> None:
    row["version"] = "0.0.9"


def change_page_size(row: dict[str, Any]) -> None:
    row["pool"] = {**row["pool"], "page_size": 64}


def change_device(row: dict[str, Any]) -> None:
    row["device"] = "cpu"


def change_engine(row: dict[str, Any]) -> None:
    row["transport"] = {**row["transport"], "engine": "mooncake"}


def slow(row: dict[str, Any]) -> None:
    row["rate"] = {**row["rate"], "gb_per_s": 0.2}


def waiting(row: dict[str, Any]) -> None:
    row["waiting_for"] = "6 of 8 prefill ranks registered"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_version, "version 0.0.9"),
        (change_page_size, "page_size 64"),
        (change_device, "device cpu"),
        (change_engine, "transport mooncake"),
        (slow, "slow"),
        (waiting, "waiting"),
    ],
)
def test_what_differs_from_most_ranks_of_the_role_is_odd(ranks: Any, change: Change, reason: str) -> None:
    rows = ranks(4)
    change(rows[3])
    assert oddities(placed(rows)) == {"prefill-3@n0": [reason]}


def test_two_halves_with_different_settings_are_not_odd(ranks: Any) -> None:
    rows = ranks(4)
    for row in rows:
        if row["host"] in {"n0", "n1"}:
            change_version(row)
    assert oddities(placed(rows)) == {}


def test_ranks_of_smaller_instances_are_not_slow(ranks: Any) -> None:
    rows = ranks(2)
    for row in rows[:3]:
        row["sizes"] = {**row["sizes"], "tp": 64}
        slow(row)
    assert oddities(placed(rows)) == {}


def test_totals_of_a_group(ranks: Any) -> None:
    rows: list[Row] = [*placed(ranks(2))]
    decode, prefill = groups(rows, By.INSTANCE)
    assert (decode.name, decode.place, decode.roles, decode.odd) == ("decode", "n1", ["decode"], False)
    assert decode.totals.summary is not None
    assert prefill.totals.summary is not None
    assert decode.totals.summary.ring_ratio == 0.375
    assert sum(decode.totals.summary.active.values()) == 6, "a room counts once per instance"
    assert prefill.totals.summary.ring_ratio is None
