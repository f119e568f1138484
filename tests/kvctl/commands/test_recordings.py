"""kvctl record: contents of files, failures and exit codes."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvctl.client import atomic_file, recorder, redaction
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


KEY = "0123456789abcdef" * 4
SECRETS = ("node7.rack", "lovelace", "/homes/lovelace", "10.9.8.7", "gpu-b12", "/srv/models", KEY, "fd00::7")


@pytest.fixture
def telling(start: Any, canned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents with names, addresses, paths and keys in all kinds of fields."""
    monkeypatch.setattr(redaction, "_hosts", lambda: ["node7.rack", "node7"])
    monkeypatch.setattr(redaction, "_users", lambda: ["lovelace"])
    texts = ["tcp://gpu-b12:7000 hung up", "gpu-b12 again", f"key {KEY}", "lovelace@node7.rack of [fd00::7]:9"]
    events = [{**canned.events("decode-0")[0], "sequence": n, "text": text} for n, text in enumerate(texts)]
    text = "10.9.8.7: /homes/lovelace/x is gone"
    cause = {"rank": "prefill-0", "code": "transport", "at_ns": canned.NOW, "text": text}
    failed = canned.room_row("decode-0", "5", state="Failed", finished_at_ns=canned.NOW, failure=cause)
    event = canned.event(1, "decode-0", "fail", peer="node7-prefill-0", detail="/srv/models/a b.bin")
    value = {"key": "fleet_key", "value": "/homes/lovelace/my keys/f.key", "origin": "file /homes/lovelace/agent.toml"}
    peer = {"peer": "node7-prefill-0", "endpoint": "tcp://10.9.8.7:1", "last_error": "lovelace"}
    answers = {
        "events": {"events": events, "next": 4, "dropped": 0},
        "history": [failed],
        "room": [{**canned.room_detail("decode-0"), "timeline": [event]}],
        "config": [{**canned.config("decode-0")[0], **value}],
        "peers": [{**canned.peers("decode-0")[0], **peer}],
    }
    start("decode-0", {command: lambda _, answer=answer: answer for command, answer in answers.items()})
    start("node7-prefill-0", canned.answers("prefill-0"))


def everything(path: Path) -> str:
    return "".join(json.dumps(snapshot.document(), ensure_ascii=False) for snapshot in load(path))


@pytest.mark.parametrize("later", [False, True])
def test_redaction_leaves_no_name_of_a_machine_a_person_a_place_or_a_key(
    later: bool, telling: None, kvctl: Any, tmp_path: Path
) -> None:
    plain, path = tmp_path / "plain.kvrec", tmp_path / "red.kvrec"
    assert kvctl("record", str(plain)).code == 0
    assert kvctl("record", str(path), "--redact", *(("--from", str(plain)) if later else ())).code == 0
    before, text = everything(plain), everything(path)
    for secret in (*SECRETS, os.environ["KVCTL_SOCKET_DIR"]):
        assert secret in before
        assert secret not in text
    assert all(f"{kind}-1" in text for kind in ("host", "user", "path", "key", "address"))
    shown = kvctl("agents", "--from", str(path), "--columns", "agent,state", "-o", "tsv")
    assert (shown.code, shown.out) == (0, "agent\tstate\ndecode-0\tok\nhost-2-prefill-0\tok\n")
    for args in (("rooms", "-o", "tsv"), ("staging", "-o", "tsv"), ("metrics", "-o", "tsv")):
        live = kvctl(*args).out.replace("node7-prefill-0", "host-2-prefill-0").replace("cmpl-7f3a", "request-1")
        assert kvctl(*args, "--from", str(path)).out == live
    if later:
        assert load(path).at_ns == load(plain).at_ns


def test_a_file_is_copied_only_to_redact_it(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "old.kvrec"
    assert kvctl("record", str(path)).code == 0
    outcome = kvctl("record", "--from", str(path), str(tmp_path / "new.kvrec"))
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
