"""Queries answered from files: contents of snapshots, data that a series does not repeat, untrusted files."""

from __future__ import annotations

import io
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.client import recorder
from kvctl.client import recording_file as form
from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault
from kvctl.client.fleet import Fleet
from kvctl.client.recorder import Series, SnapshotRecorder, save_recording, write_snapshots
from kvctl.client.recordings import Answer, RecordedAgent, RecordedSnapshot, RecordingSource, decode, encode
from kvctl.errors import CliError
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused
from kvctl_agent.observer.flight_recorder import RecordedEvents
from kvctl_agent.telemetry.clock import Clock

S = 1_000_000_000


def agent(canned: Any, name: str = "decode-0", /, **data: Any) -> RecordedAgent:
    answers = [Answer("hello", None, canned.hello(name))]
    answers += [Answer(command, None, told) for command, told in data.items()]
    return RecordedAgent(Endpoint(name, Path(f"/run/{name}.sock")), 1000, ClockOffset(5, 2), answers)


def moment(*agents: RecordedAgent, at_ns: int = S) -> RecordedSnapshot:
    return RecordedSnapshot(at_ns, Path("/run"), [], [], list(agents), [])


def saved(path: Path, *moments: RecordedSnapshot) -> Path:
    with path.open("wb") as file:
        write_snapshots(file, moments)
    return path


def back(one: RecordedSnapshot) -> RecordedSnapshot:
    data = form.file_header() + b"".join(encode(one, 0)) + form.encode_frame(form.DONE, {"frames": 1 + len(one.agents)})
    return decode(one.at_ns, [frame.body for frame in form.read_frames(io.BytesIO(data))])


def test_a_moment_comes_back_as_it_was(canned: Any) -> None:
    remote = Endpoint("decode-9", None, remote="tcp://h:1")
    no_answer = Answer("hello", None, None, Fault("decode-9", "timeout", "no answer"))
    told = agent(canned, status=canned.status("decode-0"))
    told.answers.append(Answer("peers", None, None, Fault("decode-0", "internal", "boom")))
    told.answers.append(Answer("room", "7", [canned.room_detail("decode-0")]))
    told.answers.append(Answer("layers", "7", canned.layers("decode-0")))
    one = replace(moment(told, RecordedAgent(remote, 0, ClockOffset(0, 0), [no_answer])), left_out=["the rest"])
    one.stale.append(Endpoint("old", Path("/run/old.sock")))
    one.faults.append(Fault("who", "unreachable", "nobody"))
    assert back(one) == one


def test_an_agent_that_says_too_much_loses_timelines_first_then_its_largest_answer(
    canned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = agent(canned, status=canned.status("decode-0"), rooms=[canned.room_row("decode-0")] * 9)
    whole = replace(told, answers=[*told.answers, Answer("room", "7", [canned.room_detail("decode-0")] * 9)])
    monkeypatch.setattr(form, "MAX_ANSWERS_BYTES", 12_000)
    assert back(moment(whole)).agents == [told]
    monkeypatch.setattr(form, "MAX_ANSWERS_BYTES", 3_000)
    found = back(moment(whole))
    faults = {each.command: each.fault and each.fault.code for each in found.agents[0].answers}
    assert faults == {"hello": None, "status": None, "rooms": "not-captured"}
    assert len(found.left_out) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    steps=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    capacity=st.integers(3, 30),
    since=st.none() | st.integers(0, 30),
    limit=st.integers(0, 30),
)
def test_events_of_a_series_are_those_of_the_recorder(
    canned: Any, steps: list[int], capacity: int, since: int | None, limit: int, tmp_path: Path
) -> None:
    """For any distribution of new events over snapshots, the file answers as the recorder did at each of them."""
    recorder = RecordedEvents(Clock(), "decode-0", max(capacity, sum(steps)))
    following, moments, expected = None, [], []
    for count in steps:
        for _ in range(count):
            recorder.record("room", "text")
        page = recorder.since(following, 1000)
        following = page["next"]
        moments.append(moment(agent(canned, events=page)))
        expected.append(recorder.since(since, limit))
    file = RecordingSource(saved(tmp_path / "events.kvrec", *moments), at=0)
    for index, page in enumerate(expected):
        file.seek(index)
        (found,) = file.survey([Call("events", {"since": since, "limit": limit})]).agents
        assert found.data["events"] == page


def test_a_series_holds_each_finished_room_once_and_every_moment_can_tell_it(
    start: Any, canned: Any, tmp_path: Path
) -> None:
    asked: list[int] = []

    def room(args: dict[str, Any]) -> Any:
        asked.append(args["room"])
        if args["room"] == 5:
            done = {"state": "Success", "finished_at_ns": canned.NOW}
            return [
                {
                    **canned.room_row("decode-0", "5", **done),
                    "timeline": [canned.event(0, "decode-0", "open")],
                    "timeline_dropped": 0,
                }
            ]
        raise RequestRefused(ErrorCode.UNKNOWN_ROOM, "no")

    def history(_: Any) -> Any:
        return [canned.room_row("decode-0", "5", state="Success", finished_at_ns=canned.NOW)]

    none = {
        "rooms": lambda _: [],
        "slow": lambda _: [],
        "failed": lambda _: {"rooms": [], "kept": 0, "dropped_total": 0},
    }
    start("decode-0", {**none, "history": history, "room": room})
    with Fleet((), {}, 5 * S) as fleet:
        path = tmp_path / "series.kvrec"
        saving = save_recording(fleet, path, Series(20_000_000, 10_000_000, lambda *_: None))
    assert asked == [5]
    assert [(row.agent, row.events, row.lost, row.rooms) for row in saving.saved] == [("decode-0", 2, 0, 1)]
    file = RecordingSource(path)
    assert len(file.moments) > 1
    for index in (1, 0):
        file.seek(index)
        survey = file.survey([Call("room", {"room": "5"}), Call("events")])
        ((_, details),) = survey.answers("room")
        assert [event["stage"] for event in details[0]["timeline"]] == ["open"]
        assert len(survey.agents[0].data["events"]["events"]) == 2
        assert survey.faults == []


def test_many_agents_share_what_may_be_asked(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_ROOMS_IN_TOTAL", 4)
    with Fleet((), {}, 5 * S) as asked:
        found = SnapshotRecorder(asked).take()
    rooms = [{answer.room for answer in each.answers} - {None} for each in found.agents]
    assert found.left_out == ["timelines of 12 of 16 rooms; failed and active ones come first"]
    # The failed one is the first that a person would look for.
    assert rooms == [{"6"}] * 4


def test_an_agent_that_falls_silent_midway_costs_its_own_timelines(
    start: Any, canned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_ROOMS_AT_ONCE", 1)
    released = threading.Event()
    asked: list[int] = []

    def hang(args: dict[str, Any]) -> Any:
        asked.append(args["room"])
        released.wait(20)
        return []

    start("decode-0", {"room": hang})
    start("prefill-0")
    with Fleet((), {}, 3 * S // 2) as fleet:
        found = SnapshotRecorder(fleet).take()
        released.set()
    assert found.left_out == ["some timelines of rooms, for which decode-0 took too long"]
    assert len(asked) == 1
    rooms = {each.endpoint.name: {answer.room for answer in each.answers} for each in found.agents}
    assert rooms == {"decode-0": {None}, "prefill-0": {None, canned.ROOM, "5", "6", "7"}}
    assert found.silent == []


def test_a_restarted_agent_begins_a_life_of_its_own(canned: Any, tmp_path: Path) -> None:
    def living(incarnation: str, *sequences: int) -> RecordedSnapshot:
        rows = [{**canned.events("decode-0")[0], "sequence": number} for number in sequences]
        one = agent(canned, events={"events": rows, "next": sequences[-1] + 1, "dropped": 0})
        one.hello.data["incarnation"] = incarnation
        return moment(one)

    file = RecordingSource(saved(tmp_path / "a.kvrec", living("a", 0, 1), living("a", 2), living("b", 0)), at=0)
    told = []
    while True:
        (living_one,) = file.survey([Call("events")]).agents
        told.append([row["sequence"] for row in living_one.data["events"]["events"]])
        if not file.advance():
            break
    assert told == [[0, 1], [0, 1, 2], [0]]
    file.seek(0)
    assert [row["sequence"] for row in file.survey([Call("events")]).agents[0].data["events"]["events"]] == [0, 1]


def test_what_was_not_asked_is_a_fault(canned: Any, tmp_path: Path) -> None:
    survey = RecordingSource(saved(tmp_path / "a.kvrec", moment(agent(canned)))).survey([Call("stacks")])
    assert [(fault.agent, fault.code) for fault in survey.faults] == [("decode-0", "not-captured")]
    assert "was not asked" in survey.faults[0].message


def test_moments_are_gone_through_and_chosen(canned: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.kvrec", *(moment(agent(canned), at_ns=at * S) for at in (1, 2, 3)))
    with RecordingSource(path, at=0) as file:
        assert list(file.moments) == [S, 2 * S, 3 * S]
        assert [file.survey().at_ns, file.advance(), file.survey().tick_ns] == [S, True, 2 * S]
        file.seek(2)
        assert not file.advance()
        assert file.moment == 2
        for outside in (-1, 3):
            with pytest.raises(IndexError, match="has 3 snapshots"):
                file.seek(outside)
    assert RecordingSource(path).moment == 2


def look(path: Path) -> None:
    """Sends every request for every snapshot; whatever the file contains, only a CliError may be raised."""
    try:
        file = RecordingSource(path, labels={"role": "decode"} if path.name.startswith("b") else {}, at=0)
        while True:
            file.survey([Call("status"), Call("events"), Call("room", {"room": "7"})])
            if not file.advance():
                return
    except CliError:
        return


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300)
@given(place=st.integers(0, 1 << 16), by=st.integers(1, 255), length=st.none() | st.integers(0, 1 << 16))
def test_whatever_happens_to_a_file_is_told(
    place: int, by: int, length: int | None, canned: Any, tmp_path: Path
) -> None:
    whole = saved(tmp_path / "whole.kvrec", moment(agent(canned, status=canned.status("decode-0")))).read_bytes()
    changed = bytearray(whole)
    changed[place % len(changed)] ^= by
    path = tmp_path / "changed.kvrec"
    path.write_bytes(changed if length is None else changed[: length % len(changed)])
    look(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = (
    *("endpoint", "rtt_ns", "clock", "clock.error_ns", "answers", "endpoint.name", "endpoint.path", "endpoint.remote"),
    *("answers.0.command", "answers.0.fault", "answers.0.data", "answers.0.data.name", "answers.0.data.incarnation"),
    *("answers.1.data", "answers.1.fault", "answers.2.room", "answers.2.data", "answers.3.data", "answers.4.data"),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=300)
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_whatever_a_well_made_frame_says_is_checked(field: str, value: Any, canned: Any, tmp_path: Path) -> None:
    told = agent(canned, **{each: [] for each in ("status", "rooms", "events", "history")})
    frames = list(form.read_frames(io.BytesIO(saved(tmp_path / "a.kvrec", moment(told)).read_bytes())))
    body = orjson.loads(form.decompress(frames[-1].body))
    *outer, last = field.split(".")
    within = body
    for name in outer:
        within = within[int(name)] if name.isdecimal() else within[name]
    within[last] = value
    made = [form.encode_frame(*frame) for frame in frames[:-1]]
    made.append(form.encode_frame(form.ANSWERS, frames[-1].about, zlib.compress(orjson.dumps(body))))
    path = tmp_path / "b.kvrec"
    path.write_bytes(form.file_header() + b"".join(made) + form.encode_frame(form.DONE, {"frames": len(made)}))
    look(path)


def test_a_body_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MAX_ANSWERS_BYTES", 1000)
    path = tmp_path / "bomb.kvrec"
    about = {"moment": 0, "at_ns": 1, "agents": 0, "form": 2}
    bomb = form.encode_frame(form.MOMENT, about, zlib.compress(bytes(1 << 20)))
    path.write_bytes(form.file_header() + bomb + form.encode_frame(form.DONE, {"frames": 1}))
    with pytest.raises(CliError, match="exceeds the size limit"):
        RecordingSource(path).survey()
