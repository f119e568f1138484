"""kvctl record and kvctl replay: contents of files, failures, verdicts and exit codes."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.client import atomic_file
from kvctl.lab.replay import player
from kvctl.lab.replay import verdicts as replay_verdicts
from kvctl.lab.replay.recordings import Input
from kvctl_agent.contract import recording as form
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RecordingError, RecordingVersionError, RequestRefused
from kvctl_agent.protocol import events as ev
from tests.support.answers import refusal


def read(path: Path) -> list[form.Frame]:
    with path.open("rb") as file:
        return list(form.read_frames(file))


def test_all_agents_go_into_one_file(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.kvrec"
    outcome = kvctl("-o", "json", "record", str(path))
    assert outcome.code == 0
    rows = json.loads(outcome.out)["data"]
    assert [(row["agent"], row["inputs"]) for row in rows] == [(name, 40) for name in sorted(fleet)]
    found = read(path)
    assert found[0].kind == form.HEAD
    headers = {frame.about["agent"]: frame.about["header"]["name"] for frame in found if frame.kind == form.AGENT}
    assert sorted(headers.values()) == sorted(fleet)
    for number, name in headers.items():
        blobs = [frame for frame in found if frame.kind == form.BLOB and frame.about["agent"] == number]
        assert [frame.about["kind"] for frame in blobs] == ["checkpoint", "inputs"]
        assert form.decompress(blobs[0].body) == name.encode()
    assert "decode-1: 7 inputs were not recorded" in outcome.err
    assert f"kvctl replay {path}" in outcome.err
    assert [each.name for each in tmp_path.iterdir()] == ["all.kvrec"]


def test_agents_are_chosen_as_everywhere(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "some.kvrec"
    assert kvctl("record", str(path), "-l", "role=decode").code == 0
    names = [frame.about["header"]["name"] for frame in read(path) if frame.kind == form.AGENT]
    assert names == ["decode-0", "decode-1"]


def test_what_is_lacking_is_told_with_its_own_reason(start: Any, kvctl: Any, canned: Any, tmp_path: Path) -> None:
    def ended(args: Any) -> Any:
        page = canned.inputs("decode-0", args.get("since") or 0)
        return {**page, "header": {**page["header"], "missed": 5, "fault": "TypeError: no such class"}}

    def nothing(args: Any) -> Any:
        page = canned.inputs("decode-1", args.get("since") or 0)
        return {**page, "header": {**page["header"], "missed": 0}, "blobs": [], "next": 1, "end": 1}

    start("decode-0", {"inputs": ended})
    start("decode-1", {"inputs": nothing})
    told = kvctl("record", str(tmp_path / "some.kvrec")).err
    assert "decode-0: 5 inputs were not recorded, recording stopped: TypeError: no such class" in told
    assert "decode-1: records nothing (record_inputs is 0)" in told
    assert "too many rooms" not in told


def test_nobody_there_leaves_no_file(kvctl: Any, tmp_path: Path) -> None:
    outcome = kvctl("record", str(tmp_path / "none.kvrec"))
    assert outcome.code == 3
    assert list(tmp_path.iterdir()) == []


def test_part_of_a_fleet_is_saved_and_exits_7(start: Any, kvctl: Any, canned: Any, tmp_path: Path) -> None:
    """One agent refuses at once, another after half of its inputs; the saved inputs can be replayed."""

    def half(args: Any) -> Any:
        if args.get("since"):
            raise RequestRefused(ErrorCode.INTERNAL, "boom")
        return canned.inputs("decode-1", 0)

    start("prefill-0")
    start("decode-0", {"inputs": refusal(ErrorCode.NOT_PERMITTED, "inputs needs level operate")})
    start("decode-1", {"inputs": half})
    path = tmp_path / "some.kvrec"
    outcome = kvctl("record", str(path))
    assert outcome.code == 7
    assert "decode-0: inputs needs level operate" in outcome.err
    assert "decode-1: boom" in outcome.err
    assert len([frame for frame in read(path) if frame.kind == form.AGENT]) == 2


def test_where_inputs_are_refused_there_are_moments_still(start: Any, kvctl: Any, tmp_path: Path) -> None:
    start("decode-0", {"inputs": refusal(ErrorCode.NOT_PERMITTED, "inputs needs level operate")})
    path = tmp_path / "some.kvrec"
    outcome = kvctl("record", str(path))
    assert outcome.code == 7
    assert "decode-0: inputs needs level operate" in outcome.err
    assert "record_inputs" not in outcome.err
    assert [frame.kind for frame in read(path)] == [form.HEAD, form.MOMENT, form.ANSWERS]


def test_where_nobody_answers_an_old_recording_stays(kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "old.kvrec"
    path.write_bytes(b"what was there before")
    outcome = kvctl("record", str(path))
    assert outcome.code == 3
    assert "saved to" not in outcome.err
    assert path.read_bytes() == b"what was there before"
    assert [each.name for each in tmp_path.iterdir()] == ["old.kvrec"]


def test_an_agent_whose_pages_never_end_is_a_fault(start: Any, kvctl: Any, canned: Any, tmp_path: Path) -> None:
    start("decode-0", {"inputs": lambda _: canned.inputs("decode-0", 0)})
    outcome = kvctl("record", str(tmp_path / "endless.kvrec"))
    assert outcome.code == 7
    assert "its pages do not end" in outcome.err


def test_a_file_that_cannot_be_made_is_an_error(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    outcome = kvctl("record", str(tmp_path / "no" / "where.kvrec"))
    assert outcome.code == 1
    assert "cannot write" in outcome.err


def test_a_full_disk_leaves_neither_part_nor_loss(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old.kvrec"
    path.write_bytes(b"what was there before")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_file.os, "fsync", full)
    outcome = kvctl("record", str(path))
    assert outcome.code == 1
    assert f"cannot write {path}: No space left on device" in outcome.err
    assert path.read_bytes() == b"what was there before"
    assert [each.name for each in tmp_path.iterdir()] == ["old.kvrec"]


VERDICT = {
    "agent": "decode-0",
    "role": "decode",
    "incarnation": "c0ffee",
    "inputs": 1234,
    "rooms": 56,
    "pieces": 1,
    "missed": 0,
    "dropped": 0,
    "first_at_ns": 1_000_000_000,
    "last_at_ns": 3_500_000_000,
    "notes": [],
    "breach": None,
    "shrunk": None,
}
BROKEN = {
    **VERDICT,
    "agent": "prefill-0",
    "notes": ["the recording begins at input 9: what came before is no longer kept"],
    "breach": {
        "invariant": "transfer-gated",
        "text": "KV writer 0 … goes behind the watermark",
        "number": 77,
        "at_ns": 2_000_000_000,
        "room": "12",
        "story": ["#70 -1.000 ms  SendRoom room=12", "    → StateChanged room=12 state=Bootstrapping"],
    },
    "shrunk": {"inputs": 3, "story": ["#77 +0.000 ms  decode-0 says Watermark"], "early": True, "fresh": True},
}


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Replaces the verdicts on `a.kvrec`, a recording of two agents; returns the calls of `judge`."""
    asked: list[Any] = []
    agents = [SimpleNamespace(name=name) for name in ("decode-0", "prefill-0")]
    monkeypatch.setattr(replay_verdicts, "load", lambda path: agents)
    (tmp_path / "a.kvrec").touch()

    def make(verdicts: list[Any] | Exception) -> list[Any]:
        def judged(*args: Any) -> Any:
            asked.append(args)
            if isinstance(verdicts, Exception):
                raise verdicts
            return verdicts

        monkeypatch.setattr(replay_verdicts, "judge", judged)
        return asked

    return make


def test_a_clean_recording_exits_0(answer: Any, kvctl: Any, tmp_path: Path) -> None:
    asked = answer([VERDICT])
    outcome = kvctl("replay", str(tmp_path / "a.kvrec"), "-o", "table", "--agent", "decode-0", "--no-shrink")
    assert (outcome.code, outcome.err) == (0, "")
    assert "clean" in outcome.out
    assert "1,234" in outcome.out
    agents, shrink_s, _ = asked[0]
    assert ([agent.name for agent in agents], shrink_s) == (["decode-0"], None)


def test_a_breach_is_told_with_its_story_and_exits_1(answer: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    answer([VERDICT, BROKEN])
    outcome = kvctl("replay", str(path), "-o", "table")
    assert outcome.code == 1
    for told in ("prefill-0 broke transfer-gated at input 77", "3 inputs are enough", "time was up"):
        assert told in outcome.out
    assert "prefill-0: the recording begins at input 9" in outcome.err
    document = json.loads(kvctl("replay", str(path), "-o", "json").out)
    assert document["data"][1]["breach"] == BROKEN["breach"]


@pytest.mark.parametrize(
    ("error", "exits"),
    [
        (RecordingVersionError("so it is"), 6),
        (RecordingError("so it is"), 1),
        (OSError(errno.EIO, "so it is"), 1),
    ],
)
def test_what_cannot_be_replayed_has_its_own_exit(
    error: Exception, exits: int, answer: Any, kvctl: Any, tmp_path: Path
) -> None:
    answer(error)
    outcome = kvctl("replay", str(tmp_path / "a.kvrec"))
    assert (outcome.code, outcome.out) == (exits, "")
    assert "so it is" in outcome.err


def test_an_agent_that_the_recording_lacks_is_wrong_usage(answer: Any, kvctl: Any, tmp_path: Path) -> None:
    outcome = kvctl("replay", str(tmp_path / "a.kvrec"), "--agent", "decode-9")
    assert outcome.code == 2
    assert "has no agent decode-9; it has decode-0, prefill-0" in outcome.err


def test_a_file_that_is_no_recording_is_refused(kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("what is this")
    outcome = kvctl("replay", str(path))
    assert outcome.code == 1
    assert f"{path}: it is not a kvctl recording" in outcome.err
    assert kvctl("replay", str(tmp_path / "missing")).code == 2


def test_a_replay_that_does_not_end_names_the_input_and_exits_4(
    answer: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer([])

    def endless(agents: Any, shrink_s: Any, progress: Any) -> Any:
        progress("decode-0: 0 of 7 inputs")
        machine = SimpleNamespace(handle=lambda event, now_ns: time.sleep(60))
        checker = SimpleNamespace(rooms_checked=0)
        monkeypatch.setattr(player, "_machine", lambda start, paths: (machine, checker))
        return player.play(None, [Input(5, 0, ev.Tick())])  # type: ignore[arg-type]

    monkeypatch.setattr(replay_verdicts, "judge", endless)
    monkeypatch.setattr(replay_verdicts, "TIME_LIMIT_S", 0.2)
    outcome = kvctl("replay", str(tmp_path / "a.kvrec"))
    assert outcome.code == 4
    assert "the replay did not end within 0 s (decode-0: 0 of 7 inputs, input 5: Tick)" in outcome.err
