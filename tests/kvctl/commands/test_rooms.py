"""`kvctl rooms`: filters apply before limits, and failed rooms have a list of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

CAUSE = {"rank": "decode-0", "code": "KV_PEER_LOST", "text": "peer prefill-0 lost: silent for 15 s"}


@pytest.fixture
def history(canned: Any) -> Callable[[dict[str, Any]], Any]:
    """Answers of an agent with 40 rooms, the latest first; the oldest failed."""

    def answer(args: dict[str, Any]) -> Any:
        rows = [
            canned.room_row("decode-0", str(100 - number), state="Success", finished_at_ns=canned.NOW - number)
            for number in range(39)
        ]
        failure = {**CAUSE, "at_ns": canned.NOW - canned.S}
        failed = canned.room_row("decode-0", "1", state="Failed", finished_at_ns=canned.NOW - canned.S, failure=failure)
        return [*rows, failed][: args["limit"]]

    return answer


@pytest.mark.parametrize("command", ["history", "slow"])
def test_a_filter_comes_before_the_limit(
    command: str, history: Callable[[dict[str, Any]], Any], start: Any, kvctl: Any
) -> None:
    start("decode-0", {command: history})
    outcome = kvctl("rooms", command, "-n", "5", "--filter", "state=Failed", "-o", "jsonl")
    assert [json.loads(line)["room"] for line in outcome.out.splitlines()] == ["1"]
    assert kvctl("rooms", command, "-n", "5", "-o", "jsonl").out.count("\n") == 5


def test_the_order_comes_before_the_limit(history: Callable[[dict[str, Any]], Any], start: Any, kvctl: Any) -> None:
    start("decode-0", {"history": history})
    outcome = kvctl("rooms", "history", "-n", "2", "--sort-by", "room", "-o", "jsonl")
    assert [json.loads(line)["room"] for line in outcome.out.splitlines()] == ["1", "62"]


def test_agents_look_for_a_state_themselves_before_they_limit(canned: Any, start: Any, kvctl: Any) -> None:
    asked: list[Any] = []

    def rooms(args: dict[str, Any]) -> Any:
        asked.append(args.get("state"))
        return [canned.room_row("decode-0", state="Failed")]

    start("decode-0", {"rooms": rooms})
    assert kvctl("rooms", "--filter", "state=failed", "--filter", "age>1s", "-o", "jsonl").out.count("\n") == 1
    kvctl("rooms", "--filter", "state!=failed")
    kvctl("rooms", "--filter", "age>1s", "--state", "Transferring")
    assert asked == ["Failed", None, "Transferring"]


def test_events_are_chosen_before_they_are_limited(canned: Any, start: Any, kvctl: Any) -> None:
    def events(args: dict[str, Any]) -> Any:
        row = canned.events("decode-0")[0]
        rows = [{**row, "sequence": number, "severity": "info", "text": f"event {number}"} for number in range(50)]
        rows[3] |= {"severity": "error"}
        return {"events": rows[-args["limit"] :], "next": 50, "dropped": 0}

    start("decode-0", {"events": events})
    for wanted in (("--severity", "error"), ("--filter", "severity=error")):
        outcome = kvctl("events", "-n", "2", *wanted, "-o", "jsonl")
        assert [json.loads(line)["sequence"] for line in outcome.out.splitlines()] == [3]
    outcome = kvctl("events", "-n", "2", "--filter", "severity=info", "-o", "jsonl")
    assert [json.loads(line)["sequence"] for line in outcome.out.splitlines()] == [48, 49]


def failing(canned: Any, start: Any) -> None:
    """Room 1 failed on all its ranks, on prefill-0 8 s later because it was stopped; room 2 failed on one rank."""
    cause = {**CAUSE, "at_ns": canned.NOW + 13 * canned.S}

    def answer(name: str, dropped: int = 0) -> Callable[[dict[str, Any]], Any]:
        late = 21 * canned.S if name == "prefill-0" else 0
        rows = [
            canned.room_row(
                name,
                "1",
                state="Failed",
                failure=cause,
                opened_at_ns=canned.NOW + late,
                finished_at_ns=canned.NOW + max(late, 13 * canned.S),
                missing=[],
            )
        ]
        if name == "decode-0":
            own = {"rank": "decode-0", "code": "ABORTED", "at_ns": canned.NOW + canned.S, "text": "by an operator"}
            rows.append(canned.room_row(name, "2", state="Failed", failure=own, nonce="5", missing=["prefill-1"]))
        return lambda args: {"rooms": rows[: args["limit"]], "kept": len(rows), "dropped_total": dropped}

    start("prefill-0", {"failed": answer("prefill-0")})
    start("prefill-1", {"failed": answer("prefill-1")})
    start("decode-0", {"failed": answer("decode-0", dropped=12)})


def test_a_failed_room_is_one_row_with_its_first_cause(canned: Any, start: Any, kvctl: Any) -> None:
    failing(canned, start)
    outcome = kvctl("rooms", "failed", "-o", "json")
    first, second = outcome.data
    assert (first["room"], second["room"]) == ("1", "2")
    assert (first["rank"], first["code"], first["text"]) == tuple(CAUSE.values())
    assert first["agents"] == ["prefill-0", "prefill-1", "decode-0"]
    assert first["after_ns"] == 13 * canned.S
    assert (first["waits_for"], second["waits_for"]) == ([], ["prefill-1"])
    assert outcome.err == "kvctl: failed rooms no longer kept: 12 of decode-0 (failed_rooms)\n"


def many_failures(canned: Any, start: Any) -> None:
    """Four rooms that two prefill ranks lost with decode ranks, one that the operator aborted."""

    def row(number: int, code: str, text: str, at_s: int, rank: str = "prefill-0", peer: str = "decode-1") -> Any:
        failure = {"rank": rank, "code": code, "at_ns": canned.NOW + at_s * canned.S, "text": text}
        times = {"opened_at_ns": canned.NOW, "finished_at_ns": failure["at_ns"], "nonce": str(number)}
        return canned.room_row(rank, str(number), state="Failed", failure=failure, peers=[peer], **times)

    lost = "peer {} (incarnation {}) lost: process {} has ended"
    rows = {
        "prefill-0": [
            row(1, "KV_PEER_LOST", lost.format("decode-1", "18ec5a", 77), 10),
            row(2, "KV_PEER_LOST", lost.format("decode-1", "18ec5a", 77), 11),
            row(3, "KV_PEER_LOST", lost.format("decode-0", "2f00aa, on node-7", 78), 20, peer="decode-0"),
            row(5, "ABORTED", "by an operator", 5),
        ],
        "prefill-1": [row(4, "KV_PEER_LOST", lost.format("decode-1", "18ec5a", 77), 12, rank="prefill-1")],
    }
    for name, found in rows.items():
        start(name, {"failed": lambda args, found=found: {"rooms": found, "kept": len(found), "dropped_total": 0}})


def test_failed_rooms_are_grouped_by_cause(canned: Any, start: Any, kvctl: Any) -> None:
    many_failures(canned, start)
    document = json.loads(kvctl("rooms", "failed", "--by", "cause", "-o", "json").out)
    assert document["schema"] == "kvctl.failed_causes/1"
    lost, aborted = document["data"]
    assert (lost["rooms"], lost["code"], lost["room"]) == (4, "KV_PEER_LOST", "3")
    assert lost["cause"] == "peer decode-0 (incarnation 2f00aa, on node-7) lost: process 78 has ended"
    assert (lost["peers"], lost["ranks"]) == (["decode-1", "decode-0"], ["prefill-0", "prefill-1"])
    assert (lost["first_at_ns"], lost["last_at_ns"]) == (canned.NOW + 10 * canned.S, canned.NOW + 20 * canned.S)
    assert lost["first_ago_ns"] - lost["last_ago_ns"] == 10 * canned.S
    assert (aborted["rooms"], aborted["cause"], aborted["room"]) == (1, "by an operator", "5")
    summary, _, header, first, *_ = kvctl("rooms", "failed", "--by", "cause", "-o", "table").out.splitlines()
    assert summary == "5 failed rooms   KV_PEER_LOST 4   ABORTED 1"
    assert header.split() == ["ROOMS", "CODE", "LAST", "FIRST", "EXAMPLE", "CAUSE", "PEERS", "RANKS"]
    assert first.split()[:2] == ["4", "KV_PEER_LOST"]


def test_a_filter_selects_the_rooms_that_are_grouped(canned: Any, start: Any, kvctl: Any) -> None:
    many_failures(canned, start)
    by_cause = ("rooms", "failed", "--by", "cause", "-o", "jsonl")
    (lost,) = kvctl(*by_cause, "--filter", "peers=decode-1", "--filter", "code=KV_PEER_LOST").out.splitlines()
    assert (json.loads(lost)["rooms"], json.loads(lost)["room"]) == (3, "4")
    chosen = kvctl(*by_cause, "--columns", "rooms,code", "--sort-by", "rooms").out.splitlines()
    assert [json.loads(each) for each in chosen] == [
        {"rooms": 1, "code": "ABORTED"},
        {"rooms": 4, "code": "KV_PEER_LOST"},
    ]
    assert "1 more cause: raise --limit" in kvctl(*by_cause, "-n", "1").err
    assert "no failed rooms match --filter" in kvctl(*by_cause, "--filter", "code=NONE").err


def test_the_limit_is_that_of_all_agents(canned: Any, start: Any, kvctl: Any) -> None:
    for name, ends in (("prefill-0", (9, 7, 5)), ("prefill-1", (8, 6, 4))):
        rows = [
            canned.room_row(name, str(end), state="Success", finished_at_ns=canned.NOW + end * canned.S, nonce=str(end))
            for end in ends
        ]
        start(name, {"history": lambda args, rows=rows: rows[: args["limit"]], "rooms": lambda args, rows=rows: rows})
    found = kvctl("rooms", "history", "-n", "3", "-o", "json").data
    assert [row["room"] for row in found] == ["9", "8", "7"]
    assert found[2]["ago_ns"] - found[0]["ago_ns"] == 2 * canned.S
    outcome = kvctl("rooms", "-n", "4", "-o", "jsonl")
    assert len(outcome.out.splitlines()) == 4
    assert "only the first 4 are shown: raise --limit" in outcome.err


def test_failed_rooms_are_filtered_before_they_are_limited(canned: Any, start: Any, kvctl: Any) -> None:
    failing(canned, start)
    limited = kvctl("rooms", "failed", "-n", "1", "-o", "jsonl")
    assert [json.loads(line)["room"] for line in limited.out.splitlines()] == ["1"]
    assert "1 more failed room: raise --limit" in limited.err
    chosen = kvctl("rooms", "failed", "-n", "1", "--filter", "code=ABORTED", "-o", "jsonl")
    assert [json.loads(line)["room"] for line in chosen.out.splitlines()] == ["2"]
    assert kvctl("rooms", "failed", "--filter", "code=NONE", "-o", "csv").out.count("\n") == 1


def test_who_owes_what_stands_at_the_head_of_an_active_room(canned: Any, start: Any, kvctl: Any) -> None:
    owed = {"writer": "prefill-1", "decode": "decode-0", "cells": 16, "chunks": [2, 3], "layers": [0, 32], "finals": 1}

    def room(name: str, waits_for: str) -> Callable[[dict[str, Any]], Any]:
        parts = [{**owed, "waits_for": waits_for, "age_ns": 41 * canned.S}]
        return lambda _: [{**canned.room_detail(name), "owed_parts": parts}]

    start("decode-0", {"room": room("decode-0", "")})
    start("prefill-1", {"room": room("prefill-1", "a grant of decode-0's ring")})
    lines = kvctl("rooms", "show", canned.ROOM, "-o", "table").out.splitlines()
    assert lines[1] == "request cmpl-7f3a"
    assert lines[3:5] == [
        "prefill-1 owes decode-0 16 cells (chunk 2, layers 0-31) and 1 final part for 41 s: "
        "waits for a grant of decode-0's ring",
        "decode-0 has 16 cells that arrived and are not in its pages",
    ]
    (document,) = kvctl("rooms", "show", canned.ROOM, "-o", "json").data
    assert [(debt["writer"], debt["cells"], debt["layers"]) for debt in document["owed_parts"]] == [
        ("prefill-1", 16, [0, 32])
    ]
    silent = kvctl("rooms", "show", canned.ROOM, "-o", "table", "-e", "decode-0").out
    assert "for 41 s: was not asked or did not answer" in silent


def test_a_request_id_stands_for_its_room(canned: Any, start: Any, kvctl: Any) -> None:
    def active(args: dict[str, Any]) -> Any:
        return [
            canned.room_row("decode-0", number, request_id=request_id)
            for number, request_id in [(canned.ROOM, "cmpl-7f3a-0"), ("8", "cmpl-8"), ("80", "cmpl-80"), ("9", None)]
        ]

    finished = {"history": lambda _: [], "failed": lambda _: {"rooms": [], "kept": 0, "dropped_total": 0}}
    start("decode-0", {"rooms": active, **finished})
    start("prefill-0", {"rooms": lambda _: [canned.room_row("prefill-0", "8", request_id="cmpl-8-0")], **finished})
    for text in ("cmpl-7f3a-0", "cmpl-7f3a"):
        (document,) = kvctl("rooms", "show", text, "-o", "json").data
        assert document["room"] == canned.ROOM
        assert [rank["agent"] for rank in document["ranks"]] == ["prefill-0", "decode-0"]
    # A whole id is not taken for the beginning of others, also where the room's other rank has one of those.
    assert "no agent knows room 8;" in kvctl("rooms", "show", "cmpl-8").err
    several = kvctl("rooms", "show", "cmpl")
    assert several.code == 1
    assert f"3 rooms have request ids that begin with cmpl: {canned.ROOM} (cmpl-7f3a-0), 8 (cmpl-8-0)" in several.err
    unknown = kvctl("rooms", "show", "chatcmpl-1")
    assert unknown.code == 1
    assert "no agent knows a room of request chatcmpl-1: kvctl rooms -o wide" in unknown.err
