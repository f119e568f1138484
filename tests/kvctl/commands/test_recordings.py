"""kvctl record: contents of files, failures and exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import atomic_file, recorder
from kvctl.client import recording_file as form
from kvctl.client.recordings import load
from tests.support.answers import refusal


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


@pytest.mark.parametrize("options", [(), ("--redact", "-e", "prefill-0"), ("--redact", "--for", "1s")])
def test_a_file_is_copied_whole_and_only_to_redact_it(
    fleet: Any, kvctl: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    path = tmp_path / "old.kvrec"
    assert kvctl("record", str(path)).code == 0
    outcome = kvctl("record", "--from", str(path), str(tmp_path / "new.kvrec"), *options)
    assert (outcome.code, [each.name for each in tmp_path.iterdir()]) == (2, ["old.kvrec"])


def test_an_agent_that_hangs_and_one_that_refuses_hold_nobody_up(
    start: Any, hang: Any, kvctl: Any, tmp_path: Path
) -> None:
    start("decode-0")
    start("prefill-0", {"staging": refusal()})
    path = tmp_path / "some.kvrec"
    hang("decode-1")
    outcome = kvctl("record", str(path), "--timeout", "1s")
    assert outcome.code == 7
    assert "decode-1: no answer within" in outcome.err
    shown = kvctl("staging", "--from", str(path))
    assert (shown.code, "prefill-0: boom" in shown.err) == (7, True)


def test_sockets_whose_names_are_no_text_hold_nothing_up(
    start: Any, socket_directory: Path, kvctl: Any, tmp_path: Path
) -> None:
    start("decode-0")
    path = tmp_path / "odd.kvrec"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fsencode(socket_directory / os.fsdecode(b"odd-\xff.sock")))
    assert kvctl("record", str(path)).code == 0
    shown = kvctl("agents", "--from", str(path), "--columns", "agent,state", "-o", "tsv").out
    assert "odd-\\udcff\tstale" in shown.replace("\\\\", "\\")


def test_ctrl_c_between_snapshots_keeps_what_was_said(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder.time, "sleep", interrupted)
    path = tmp_path / "series.kvrec"
    outcome = kvctl("record", str(path), "--for", "1h")
    assert outcome.code == 130
    assert "1 snapshot saved" in outcome.err
    assert kvctl("status", "--from", str(path)).code == 0


def test_a_pipe_is_no_file_to_replace(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcome = kvctl("record", str(pipe))
    assert (outcome.code, "is not a regular file" in outcome.err) == (1, True)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_what_is_recorded_with_redact_has_no_name_of_this_machine(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "red.kvrec"
    assert kvctl("record", str(path), "--redact").code == 0
    text = "".join(json.dumps(snapshot.document()) for snapshot in load(path))
    assert os.environ["KVCTL_SOCKET_DIR"] not in text
    assert '"directory": "path-1"' in text
    for args in (("rooms", "-o", "tsv"), ("staging", "-o", "tsv")):
        live = kvctl(*args).out.replace("cmpl-7f3a", "request-1")
        assert kvctl(*args, "--from", str(path)).out == live


def test_a_bundle_is_a_recording_of_two_moments(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = kvctl("debug", "bundle", "--redact")
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(r"kvctl-bundle-\d{8}-\d{6}\.kvrec", path.name)
    assert outcome.code == 0
    assert f"saved to {path.name}: kvctl status --from {path.name}" in outcome.err
    first, second = load(path)
    assert second.at_ns - first.at_ns >= 2_000_000_000
    assert os.environ["KVCTL_SOCKET_DIR"] not in json.dumps([first.document(), second.document()])
    assert sorted(row["agent"] for row in kvctl("agents", "-o", "json", "--from", path.name).data) == sorted(fleet)


def test_a_bundle_has_the_options_of_a_recording(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl.commands.debug._APART_NS", 1_000_000)
    path, public = tmp_path / "a.kvrec", tmp_path / "b.kvrec"
    assert kvctl("debug", "bundle", str(path)).code == 0
    copied = kvctl("debug", "bundle", "--from", str(path), str(public))
    assert (copied.code, "add --redact" in copied.err) == (2, True)
    assert kvctl("debug", "bundle", "--from", str(path), str(public), "--redact").code == 0
    texts = [json.dumps([each.document() for each in load(file)]) for file in (path, public)]
    assert [os.environ["KVCTL_SOCKET_DIR"] in text for text in texts] == [True, False]
