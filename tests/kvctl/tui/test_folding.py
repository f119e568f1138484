"""Large fleets in the overview: instances that fold, odd ones first."""

from __future__ import annotations

from typing import Any

from kvctl.render.groups import outline, placed
from kvctl.render.selection import find_column
from kvctl.render.status import GROUPS
from kvctl.render.view import Row


def status(name: str, instance: int, **changes: Any) -> dict[str, Any]:
    rank = int(name[-1])
    row: dict[str, Any] = {
        "name": name,
        "role": "decode",
        "host": f"n{instance}",
        "rank": {"dp": rank, "pp": 0, "cp": 0, "tp": 0, "unique": rank},
        "sizes": {"dp": 2, "pp": 1, "cp": 1, "tp": 1},
        "version": "1",
        "transport": {"engine": "nixl", "backend": "UCX"},
        "device": "cpu",
        "pool": {"page_size": 16},
        "rooms": {"Transferring": 1},
        "rooms_finished_total": {"Success": 2, "Failed": 0},
        "rooms_finished_5m": {"Success": 2},
        "bytes_total": 1,
        "rate": {"gb_per_s": 1.0, "rooms_per_s": 1.0},
        "latency": {"p50_ns": 1, "p90_ns": 1, "p99_ns": 1, "count": 1},
        "ring": None,
        "waiting_for": None,
        "health": [],
    }
    return {**row, **changes}


def fleet(*more: dict[str, Any], **odd: Any) -> list[dict[str, Any]]:
    names = [f"i{number}-decode-{rank}" for number in range(3) for rank in range(2)]
    rows = [status(name, int(name[1]), **(odd if name == "i1-decode-1" else {})) for name in names]
    return placed([*rows, *more])


def value(line: Row, column: str) -> Any:
    return find_column(GROUPS, column).value(line)


def lines(rows: list[dict[str, Any]], *unfolded: str) -> list[tuple[str, str]]:
    return [(line["group"], value(line, "health")) for line in outline(rows, unfolded)]


def test_instances_are_folded() -> None:
    assert lines(fleet()) == [("i0-decode", "ok"), ("i1-decode", "ok"), ("i2-decode", "ok")]


def test_an_unfolded_instance_lists_its_agents() -> None:
    (fold,) = (line["fold"] for line in outline(fleet(), ()) if line["group"] == "i1-decode")
    agents = [("└ i1-decode-0", "ok"), ("└ i1-decode-1", "ok")]
    assert lines(fleet(), fold) == [("i0-decode", "ok"), ("i1-decode", "ok"), *agents, ("i2-decode", "ok")]


def test_odd_instances_come_first_with_their_odd_agents() -> None:
    rows = fleet(health=["KV_PEER_LOST"])
    first, second, *rest = outline(rows, ())
    assert (first["group"], value(first, "health")) == ("i1-decode", "KV_PEER_LOST (1)")
    assert (second["name"], value(second, "health")) == ("i1-decode-1", "KV_PEER_LOST")
    assert [line["group"] for line in rest] == ["i0-decode", "i2-decode"]


def test_an_agent_that_has_ended_is_named_below_its_instance() -> None:
    first, second, *_ = outline(fleet(ended_age_ns=90_000_000_000, health=["KV_PROCESS_ENDED"]), ())
    assert (first["group"], value(first, "up"), value(first, "health")) == ("i1-decode", "1 of 2", "1 ended")
    assert (second["name"], value(second, "health")) == ("i1-decode-1", "ended, KV_PROCESS_ENDED")
    assert "active" not in second


def test_silent_agents_form_groups_by_host_with_the_time_of_their_last_answer() -> None:
    silent = {"name": "gone-0", "host": "n9", "health": ["35 s ago"]}
    other = {"name": "gone-1", "host": "n9", "health": ["36 s ago"]}
    found = outline(fleet(silent, other), ("host n9",))
    assert [(line["group"], value(line, "health")) for line in found[:3]] == [
        ("host n9", "silent"),
        ("└ gone-0", "silent, 35 s ago"),
        ("└ gone-1", "silent, 36 s ago"),
    ]
    assert len({str(line.get("name") or line["fold"]) for line in found}) == len(found)


def groups_of(pilot: Any) -> list[str]:
    return [row["group"] for row in pilot.app.panel.main.listing.rows]


def test_enter_unfolds_and_folds_and_narrows_to_an_agent(large: Any, build: Any, drive: Any) -> None:
    async def script(pilot: Any) -> None:
        assert groups_of(pilot)[:2] == ["decode", "prefill"]
        await pilot.press("enter")
        await pilot.pause()
        assert len(groups_of(pilot)) == 2 + 32
        await pilot.press("down", "enter")
        await pilot.pause()
        assert [row["name"] for row in pilot.app.panel.main.listing.rows] == ["decode-0"]
        await pilot.press("enter")
        await pilot.pause()
        assert pilot.app.panel_name == "record"
        await pilot.press("escape", "escape")
        await pilot.pause()
        assert len(groups_of(pilot)) == 2 + 32
        await pilot.press("home", "enter")
        await pilot.pause()
        assert groups_of(pilot)[:2] == ["decode", "prefill"]

    drive(build(large, "overview"), script)


def test_a_filter_lists_agents(large: Any, build: Any, drive: Any) -> None:
    async def script(pilot: Any) -> None:
        await pilot.press("slash", *"host=node-3 ", "&", *" role=decode", "enter")
        await pilot.pause()
        assert len(pilot.app.panel.main.listing.rows) == 32

    drive(build(large, "overview"), script)
