"""kvctl record: contents of files, failures and exit codes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import atomic_file
from kvctl.client import recording_file as form


def read(path: Path) -> list[form.Frame]:
    with path.open("rb") as file:
        return list(form.read_frames(file))


def agents(path: Path) -> list[str]:
    return [frame.about["agent"] for frame in read(path) if frame.kind == form.ANSWERS]


def test_all_agents_go_into_one_file(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "all.kvrec"
    outcome = kvctl("-o", "json", "record", str(path))
    assert outcome.code == 0
    rows = outcome.data
    assert [row["agent"] for row in rows] == sorted(fleet)
    assert {row["lost"] for row in rows} == {0}
    events = kvctl("events", "-o", "json", "--from", str(path)).data
    for row in rows:
        assert row["events"] == len([event for event in events if event["agent"] == row["agent"]])
    assert sum(row["events"] for row in rows) > 0
    assert read(path)[0].kind == form.HEAD
    assert sorted(agents(path)) == sorted(fleet)
    assert [each.name for each in tmp_path.iterdir()] == ["all.kvrec"]


def test_agents_are_chosen_as_everywhere(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "some.kvrec"
    assert kvctl("record", str(path), "-l", "role=decode").code == 0
    assert agents(path) == ["decode-0", "decode-1"]


def test_events_that_an_agent_dropped_between_snapshots_are_counted(start: Any, kvctl: Any, tmp_path: Path) -> None:
    def overwritten(args: Any) -> Any:
        since = args.get("since") or 0
        return {"events": [], "next": since + 5, "dropped": 5 * (args.get("since") is not None)}

    start("decode-0", {"events": overwritten})
    path = tmp_path / "lossy.kvrec"
    outcome = kvctl("record", str(path), "--for", "20ms", "--every", "10ms")
    count = len([frame for frame in read(path) if frame.kind == form.MOMENT])
    lost = 5 * (count - 1)
    assert outcome.code == 0
    assert f"not in the file: decode-0: {lost} events between two snapshots" in outcome.err


def test_nobody_there_leaves_no_file(kvctl: Any, tmp_path: Path) -> None:
    outcome = kvctl("record", str(tmp_path / "none.kvrec"))
    assert outcome.code == 3
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_answers_an_old_recording_stays(kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "old.kvrec"
    path.write_bytes(b"what was there before")
    outcome = kvctl("record", str(path))
    assert outcome.code == 3
    assert "saved to" not in outcome.err
    assert path.read_bytes() == b"what was there before"
    assert [each.name for each in tmp_path.iterdir()] == ["old.kvrec"]


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
