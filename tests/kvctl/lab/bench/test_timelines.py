"""Timelines of rooms: joining both ends of a part, choosing a typical trial."""

from __future__ import annotations

from typing import Any

from kvctl.lab.bench.program import Case
from kvctl.lab.bench.room_timing import RoomTiming, TimedTrial
from kvctl.lab.bench.timelines import layer_groups, room_timelines, typical
from kvctl.lab.bench.trials import Trial
from kvctl.lab.ranks.messages import Room

NAMES: Any = {"prefill-0": {"role": "prefill", "device": -1}, "decode-0": {"role": "decode", "device": -1}}
PLAN: Any = {"transport": "nixl", "loads": [{"concurrency": 4}]}
CASE = Case(0, "staged", "on", 1.0)


def part(peer: str, chunk: int | None = 0, layers: tuple[int, int] = (0, 4), **moments: int) -> dict[str, Any]:
    return {
        "writer": 0,
        "peer": peer,
        "chunk": chunk,
        "layers": list(layers),
        "path": "staged",
        "bytes": 1,
        "moments": moments,
    }


def finished(latency: int = 5, sent: list[Any] | None = None, received: list[Any] | None = None) -> TimedTrial:
    room = Room(index=7, number=900, tokens=64, prefix_tokens=0, decode_dp=0)
    reports: Any = {
        "prefill-0": {"waterfall": sent or []},
        "decode-0": {"waterfall": received or []},
    }
    timing = RoomTiming(room, 0, 1, 10, 9, 10 + latency, 10 + latency, 10 + latency, None, 1, 10 + latency)
    return TimedTrial(Trial(CASE, 0, 0, (room,), reports, shown=7), {7: timing}, {})


def test_a_part_is_seen_from_both_its_ends_and_drawn_once():
    trial = finished(
        sent=[part("decode-0", layers=(4, 8), ready=6, wire=9), part("decode-0", ready=2, gather=3, wire=5)],
        received=[part("prefill-0", arrive=6, scatter=7)],
    )
    (life,) = room_timelines({CASE: [trial]}, NAMES, PLAN)
    assert (life["forward_start_ns"], life["forward_done_ns"], life["success_ns"]) == (1, 10, 15)
    assert life["title"] == "staged, pipeline on: 64 tokens, concurrency 4"
    first, second = life["parts"]
    assert (first["agent"], first["peer"], first["layers"]) == ("prefill-0", "decode-0", [0, 4])
    assert first["moments"] == {"ready": 2, "gather": 3, "wire": 5, "arrive": 6, "scatter": 7}
    assert second["moments"] == {"ready": 6, "wire": 9}


def test_a_room_of_middling_latency_is_shown():
    middling = typical([finished(1), finished(50), finished(9)])
    assert middling is not None
    assert middling.timings[7].latency_ns == 9


def test_where_no_shown_room_succeeded_there_is_nothing_to_show():
    failed = TimedTrial(finished().trial, {}, {7: "lost"})
    assert typical([failed]) is None
    assert room_timelines({CASE: [failed]}, NAMES, PLAN) == []


def test_of_many_loads_the_one_in_the_middle_is_shown():
    trials = {Case(load, "staged", "on", 1.0): [finished(load)] for load in range(1, 6)}
    plan: Any = {"transport": "nixl", "loads": [{"concurrency": 1 << load} for load in range(6)]}
    (life,) = room_timelines(trials, NAMES, plan)
    assert life["success_ns"] - life["forward_done_ns"] == 3
    assert life["title"].endswith("concurrency 8")


class TestLayerGroups:
    def groups(self, *parts: Any) -> int | None:
        return layer_groups(finished(sent=list(parts)).trial, NAMES, layers=8)

    def test_they_are_those_of_one_chunk_to_one_reader(self):
        assert self.groups(part("a"), part("a", layers=(4, 8)), part("b"), part("a", chunk=1)) == 2

    def test_draft_layers_state_and_aux_rows_are_none(self):
        assert self.groups(part("a", layers=(0, 8)), part("a", layers=(8, 9)), part("a", chunk=None)) == 1

    def test_nothing_is_known_of_a_room_without_parts(self):
        assert self.groups() is None
