"""Exports one room as a trace for ui.perfetto.dev: all ranks on one clock, a process per agent, a track per writer.

The format is Chrome's trace-event JSON. Times are microseconds since the room was opened. Slices of one track may nest
but not overlap, whereas the parts of a writer do overlap: concurrent parts get additional tracks ("writer 0", "writer 0
· 2", …).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvctl.client.room_timeline import PartTimeline, RoomTimeline
from kvctl.render.clocks import corrections
from kvctl_agent.contract.states import STAGES
from kvctl_agent.contract.values import layer_range

_INSTANTS_TRACK = 0
_PREFILL = ("ready", "gate", "queue", "gather", "post", "wire")
_DECODE = ("arrive", "scatter")
_ORDER = {"X": 0, "i": 1, "s": 2, "f": 3}  # order of events with equal times: an arrow binds to a slice that has begun

Event = dict[str, Any]


def trace(room: RoomTimeline) -> dict[str, Any]:
    """Returns the trace document: `traceEvents` in order of time, metadata first."""
    agents = {rank["agent"]: number for number, rank in enumerate(room.ranks, 1)}
    roles = {rank["agent"]: rank["role"] for rank in room.ranks}
    writers = _writers(room)
    tracks = _Tracks()
    events: list[Event] = []
    for part in sorted(room.parts, key=lambda part: min(part.moments.values())):
        events += _part(room, part, agents, writers.get(part.writer), tracks)
    for event in room.timeline:
        if event["stage"] not in STAGES and event["agent"] in agents:
            events.append(_instant(event, agents[event["agent"]]))
    if room.failure is not None and room.failure["rank"] in agents:
        at = _us(room.failure["at_ns"] - room.started_at_ns)
        name = f"failed first: {room.failure['code']}"
        pid = agents[room.failure["rank"]]
        text = {"text": room.failure["text"]}
        events.append({"ph": "i", "s": "p", "name": name, "ts": at, "pid": pid, "tid": _INSTANTS_TRACK, "args": text})
    events.sort(key=lambda event: (event["ts"], _ORDER[event["ph"]]))
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "room": room.room,
            "nonce": room.nonce,
            "state": room.state,
            "clocks": corrections(room.clocks, room.hosts) or "none differs",
        },
        "traceEvents": [*_names(agents, roles, tracks), *events],
    }


class _Tracks:
    """Tracks of a trace; assigns each part a track that is free for the part's duration."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, int], list[float]] = {}  # by process and writer: time at which each track is free
        self.names: dict[tuple[int, int], str] = {}  # by process and track

    def place(self, pid: int, writer: int, begin: float, end: float) -> int:
        ends = self._ends.setdefault((pid, writer), [])
        place = next((place for place, free in enumerate(ends) if free <= begin), len(ends))
        ends[place:] = [end, *ends[place + 1 :]]
        tid = 1 + writer * 1000 + place
        self.names[pid, tid] = f"writer {writer}" + (f" · {place + 1}" if place else "")
        return tid


def _writers(room: RoomTimeline) -> dict[int, str]:
    """Returns the agent of each writer, found in events that only writers record."""
    return {
        event["writer"]: event["agent"]
        for event in room.timeline
        if event["stage"] in _PREFILL and event["writer"] is not None
    }


def _part(
    room: RoomTimeline, part: PartTimeline, agents: Mapping[str, int], writer: str | None, tracks: _Tracks
) -> Iterable[Event]:
    """Yields the slices of a part on its writer and on its decode rank, with an arrow between them."""
    sent = _end(room, part, _PREFILL, agents.get(writer or ""), tracks)
    landed = _end(room, part, _DECODE, agents.get(part.decode), tracks)
    yield from sent
    yield from landed
    post = next((event for event in sent if event["name"] in ("wire", "post")), None)
    if post is not None and landed:
        flow = f"{part.writer}.{part.chunk}.{part.layers[0]}.{part.decode}"
        for phase, slice_ in (("s", post), ("f", landed[0])):
            arrow = {
                "ph": phase,
                "cat": "part",
                "name": "bytes",
                "id": flow,
                "pid": slice_["pid"],
                "tid": slice_["tid"],
            }
            yield {**arrow, "ts": slice_["ts"], **({"bp": "e"} if phase == "f" else {})}


def _end(
    room: RoomTimeline, part: PartTimeline, stages: Iterable[str], pid: int | None, tracks: _Tracks
) -> list[Event]:
    """Returns the slices of a part on one rank: an outer one for the part, and one inside it for each stage."""
    moments = [(stage, _us(part.moments[stage] - room.started_at_ns)) for stage in stages if stage in part.moments]
    if pid is None or not moments:
        return []
    begin, end = min(at for _, at in moments), max(at for _, at in moments)
    tid = tracks.place(pid, part.writer, begin, end)
    layers = f"L{layer_range(*part.layers)}"
    where = {"cat": "part", "pid": pid, "tid": tid}
    about = {"chunk": part.chunk, "layers": list(part.layers), "writer": part.writer, "decode": part.decode}
    found: list[Event] = [
        {"ph": "X", "name": f"chunk {part.chunk} {layers}", "ts": begin, "dur": end - begin, "args": about, **where}
    ]
    last = begin
    for stage, at in moments[1:]:
        at = max(at, last)  # the clocks of the two ends differ slightly
        found.append({"ph": "X", "name": stage, "ts": last, "dur": at - last, **where})
        last = at
    return found


def _instant(event: Mapping[str, Any], pid: int) -> Event:
    args = {name: event[name] for name in ("peer", "detail", "writer", "chunk", "layers") if event[name] is not None}
    return {
        "ph": "i",
        "s": "t",
        "cat": "room",
        "name": event["stage"],
        "ts": _us(event["relative_ns"]),
        "pid": pid,
        "tid": _INSTANTS_TRACK,
        "args": args,
    }


def _names(agents: Mapping[str, int], roles: Mapping[str, str], tracks: _Tracks) -> Iterable[Event]:
    """Yields metadata events with the names and the order of processes and tracks."""
    for agent, pid in agents.items():
        yield _meta("process_name", pid, 0, name=agent)
        yield _meta("process_labels", pid, 0, labels=roles[agent])
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
        yield _meta("thread_name", pid, _INSTANTS_TRACK, name="room")
    for (pid, tid), name in sorted(tracks.names.items()):
        yield _meta("thread_name", pid, tid, name=name)
        yield _meta("thread_sort_index", pid, tid, sort_index=tid)


def _meta(name: str, pid: int, tid: int, /, **args: Any) -> Event:
    return {"ph": "M", "name": name, "ts": 0, "pid": pid, "tid": tid, "args": args}


def _us(ns: int) -> float:
    return ns / 1000
