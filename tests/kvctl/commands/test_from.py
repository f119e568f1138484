"""--from: a file gives the same output as the fleet in every format; an unreadable file gives a one-line error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import recorder
from kvctl.client import recording_file as form
from kvctl.client.recordings import RecordingSource
from tests.support.answers import refusal

ROOM = "18446744073709551615"
READING = (
    ("status",),
    ("agents", "--columns", "agent,state,role,uptime,version,incarnation,endpoint"),
    ("rooms",),
    ("rooms", "--state", "waitingforinput", "-n", "1"),
    ("rooms", "history"),
    ("rooms", "history", "-n", "1"),
    ("rooms", "slow"),
    ("rooms", "show", ROOM),
    ("staging",),
    ("staging", "map"),
    ("layers",),
    ("peers",),
    ("metrics",),
    ("events",),
    ("config", "show"),
    ("bootstrap",),
)
# Values that differ between readings: the time, and the error bounds of clocks.
_MEASURED = (
    (re.compile(r'"?\b(?:generated_at_ns|clock_error_ns|offset_ns|error_ns)"?: ?-?\d+'), ""),
    (re.compile(r"\S+ (?:ns|µs|ms)$", re.MULTILINE), ""),
    (re.compile(r" +CLOCK ±$| +$", re.MULTILINE), ""),
)


def fixed(text: str) -> str:
    for pattern, by in _MEASURED:
        text = pattern.sub(by, text)
    return text


@pytest.fixture
def recording(fleet: Any, kvctl: Any, tmp_path: Path) -> Path:
    path = tmp_path / "fleet.kvrec"
    assert kvctl("record", str(path)).code == 0
    return path


def test_a_recording_shows_what_the_fleet_showed(
    recording: Path, now: None, kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for args in READING:
        for output in ("json", "wide"):
            for more in ((), ("-l", "role=decode"), ("-e", "prefill-*", "-e", "decode-1")):
                live = kvctl(*args, "-o", output, *more)
                file = kvctl(*args, "-o", output, *more, "--from", str(recording))
                assert live.out, args
                assert (file.code, fixed(file.out)) == (live.code, fixed(live.out)), args
                assert f"{recording.name} as of 20" in file.err, args


def test_faults_and_refusals_are_the_same(start: Any, kvctl: Any, tmp_path: Path) -> None:
    start("decode-0")
    start("decode-1", {"peers": refusal()})
    start("newer", protocol=[7, 9])
    path = tmp_path / "some.kvrec"
    assert kvctl("record", str(path)).code == 7
    for args in (("peers",), ("rooms",), ("agents", "--columns", "agent,state"), ("peers", "-l", "role=decode")):
        live, file = kvctl(*args, "-o", "json"), kvctl(*args, "-o", "json", "--from", str(path), "-q")
        assert (file.code, fixed(file.out), file.err) == (live.code, fixed(live.out), live.err)
        assert live.code == 7


def test_who_is_not_in_the_file_is_told(recording: Path, kvctl: Any) -> None:
    outcome = kvctl("rooms", "--from", str(recording), "-e", "decode-7")
    assert outcome.code == 3
    assert f"{recording} has no agent decode-7, did you mean decode-" in outcome.err
    outcome = kvctl("rooms", "--from", str(recording), "-l", "tp=9")
    assert (outcome.code, outcome.out) == (3, "")
    assert "no agent has the labels tp=9; 4 others answered" in outcome.err


def test_a_room_that_nobody_knew_is_unknown(recording: Path, kvctl: Any) -> None:
    for number in ("7", "12"):
        outcome = kvctl("rooms", "show", number, "--from", str(recording))
        assert (outcome.code, outcome.out) == (1, kvctl("rooms", "show", number).out)
        assert f"no agent knows room {number}" in outcome.err


def test_a_room_whose_timeline_was_left_out_says_so(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_ROOMS_PER_AGENT", 1)
    path = tmp_path / "short.kvrec"
    told = kvctl("record", str(path)).err
    assert "not in the file: timelines of 12 of 16 rooms" in told
    outcome = kvctl("rooms", "show", "7", "-o", "json", "--from", str(path))
    assert outcome.code == 0
    assert outcome.data[0]["state"] == "WaitingForInput"
    assert "decode-0: the timeline of this room was left out of short.kvrec" in outcome.err


def test_watching_a_file_plays_its_moments_once(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "series.kvrec"
    for milliseconds in (40, 400, 4000, 40_000):  # a busy machine takes longer for a moment
        outcome = kvctl("record", str(path), "--for", f"{milliseconds}ms", "--every", "5ms")
        assert outcome.code == 0
        if (count := len(RecordingSource(path).moments)) > 1:
            break
    assert count > 1
    assert f"{count} snapshots in" in outcome.err
    lines = kvctl("status", "--from", str(path), "-w", "0.001", "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["at_ns"] for line in lines] == list(RecordingSource(path).moments)
    played = kvctl("rooms", "--from", str(path), "-w", "0.001", "-o", "json")
    assert (played.code, len(played.out.splitlines())) == (0, count)
    # Each event is printed once, although every snapshot contains it.
    assert kvctl("events", "--from", str(path), "-w", "0.001").out.count("  decode-0  ") == 2


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _newer_file(data: bytes) -> bytes:
    return form.MAGIC + b"\x09\0\0\0" + data[12:]


def _moment(**changes: int) -> bytes:
    moment = form.encode_frame(form.MOMENT, {"moment": 0, "at_ns": 1, "agents": 0, "form": 2, **changes})
    return form.file_header() + moment + form.encode_frame(form.DONE, {"frames": 1})


def _no_snapshot(data: bytes) -> bytes:
    return form.file_header() + form.encode_frame(form.DONE, {"frames": 0})


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (_cut, 1, "it is truncated"),
        (lambda data: b"", 1, "it is not a kvctl recording"),
        (lambda data: b"hello", 1, "it is not a kvctl recording"),
        (lambda data: data[:300] + b"\0" + data[301:], 1, "it is damaged"),
        (_newer_file, 6, "version 9, this kvctl reads version 1"),
        (lambda data: _moment(moment=1), 1, "its snapshots are not consecutive"),
        (lambda data: _moment(form=3), 6, "snapshots have version 3, this kvctl reads version 2"),
        (_no_snapshot, 1, "it has no snapshot of a fleet: record one with kvctl record\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(
    change: Callable[[bytes], bytes], code: int, told: str, recording: Path, kvctl: Any
) -> None:
    recording.write_bytes(change(recording.read_bytes()))
    outcome = kvctl("status", "--from", str(recording))
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith(f"kvctl: {recording}: ")
    assert told in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_file_that_is_missing_or_not_ours(kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvctl("status", "--from", str(tmp_path / "missing")).code == 2
    assert kvctl("status", "--from", str(tmp_path)).code == 2
    path = tmp_path / "theirs.kvrec"
    path.touch()

    read = Path.open

    def deny(self: Path, *args: Any, **more: Any) -> Any:
        if self == path:
            raise PermissionError
        return read(self, *args, **more)

    monkeypatch.setattr(Path, "open", deny)
    outcome = kvctl("status", "--from", str(path))
    assert (outcome.code, outcome.err) == (5, f"kvctl: {path}: you may not read it\n")


def test_answers_of_another_shape_are_told_in_one_line(start: Any, kvctl: Any, tmp_path: Path) -> None:
    start("decode-0", {"staging": lambda _: {"agent": "decode-0"}})
    path = tmp_path / "odd.kvrec"
    assert kvctl("record", str(path)).code == 0
    outcome = kvctl("staging", "map", "--from", str(path))
    assert outcome.code == 6
    assert "this kvctl cannot read its contents: KeyError 'ring'" in outcome.err
