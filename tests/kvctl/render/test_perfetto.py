"""A room's trace for Perfetto: well-formed events, slices that nest, arrows from post to arrival."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.clock import ClockOffset
from kvctl.client.room_timeline import join
from kvctl.render.perfetto import trace

EXACT = 1e-6  # µs


@pytest.fixture
def events(canned: Any) -> list[dict[str, Any]]:
    details = [canned.room_detail(name) for name in ("prefill-0", "prefill-1", "decode-0")]
    # A second part of writer 0, under way at the same time as its first.
    for name, stages in (
        ("prefill-0", {"ready": 4, "gather": 10, "post": 10.5, "wire": 15}),
        ("decode-0", {"arrive": 16}),
    ):
        detail = next(one for one in details if one["agent"] == name)
        detail["timeline"] += [
            canned.event(at, name, stage, 0, chunk=1, peer="decode-0" if name != "decode-0" else "prefill-0")
            for stage, at in stages.items()
        ]
    (room,) = join(details, {name: ClockOffset(0, 1000) for name in ("prefill-0", "prefill-1", "decode-0")})
    document = json.loads(json.dumps(trace(room)))
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def test_every_event_has_what_the_format_asks_for(events: list[dict[str, Any]]) -> None:
    assert {event["ph"] for event in events} == {"M", "X", "i", "s", "f"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] in ("t", "p", "g")
    stamps = [event["ts"] for event in events]
    assert stamps == sorted(stamps)


def test_slices_of_a_track_nest_or_follow_each_other(events: list[dict[str, Any]]) -> None:
    seen = tracks(events)
    assert len(seen) == 5  # writer 0 twice and writer 1 once where they send; both parts of writer 0 where they land
    for slices in seen.values():
        open_ends: list[float] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while open_ends and open_ends[-1] <= event["ts"] + EXACT:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + EXACT
            open_ends.append(end)


def test_stages_are_as_long_as_they_took_and_processes_are_agents(events: list[dict[str, Any]]) -> None:
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["decode-0", "prefill-0", "prefill-1"]
    first = {event["name"]: event["dur"] for slices in tracks(events).values() for event in slices[:1]}
    assert first
    durations = {
        event["name"]: event["dur"]
        for slices in tracks(events).values()
        for event in slices
        if names[event["pid"]] == "prefill-1"
    }
    assert durations["gate"] == pytest.approx(100)
    assert durations["gather"] == pytest.approx(5900)
    assert durations["post"] == pytest.approx(200)


def test_arrows_go_from_the_writer_s_slice_to_the_decode_rank_s(events: list[dict[str, Any]]) -> None:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2  # what has not arrived has none
    slices = tracks(events)
    for flow, start in starts.items():
        assert start["ts"] <= ends[flow]["ts"]
        assert start["pid"] != ends[flow]["pid"]
        for event in (start, ends[flow]):
            mine = slices[event["pid"], event["tid"]]
            assert any(one["ts"] <= event["ts"] <= one["ts"] + one["dur"] for one in mine)


def test_the_command_writes_the_file_beside_what_it_prints(fleet: Any, kvctl: Any, canned: Any, tmp_path: Path) -> None:
    path = tmp_path / "room.json"
    outcome = kvctl("rooms", "show", canned.ROOM, "--perfetto", str(path))
    assert outcome.code == 0
    assert "ui.perfetto.dev" in outcome.err
    document = json.loads(path.read_text())
    assert document["otherData"]["room"] == canned.ROOM
    assert {event["ph"] for event in document["traceEvents"]} >= {"M", "X", "i", "s", "f"}


def test_a_file_that_cannot_be_written_is_an_error(fleet: Any, kvctl: Any, canned: Any, tmp_path: Path) -> None:
    outcome = kvctl("rooms", "show", canned.ROOM, "--perfetto", str(tmp_path / "no" / "room.json"))
    assert outcome.code == 1
    assert "cannot write" in outcome.err
