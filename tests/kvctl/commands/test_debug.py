"""kvctl debug: contents of bundles, redaction, interrupts and failures."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from kvctl.client import recorder, redaction
from kvctl.client import recording_file as form
from kvctl.client.bundles import RECORDING, Archive
from kvctl.client.recordings import load
from kvctl.commands import debug_bundle
from kvctl.commands.output import Output
from tests.support.answers import refusal

KEY = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the two snapshots of a bundle without the pause of one second."""
    monkeypatch.setattr(debug_bundle, "_APART_NS", 1_000_000)


def unpacked(path: Path) -> dict[str, bytes]:
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        files = [(each.name, archive.extractfile(each)) for each in archive]
        return {name: file.read() for name, file in files if file is not None}


def told(path: Path) -> Any:
    return json.loads(unpacked(path)["manifest.json"])


def test_a_bundle_holds_what_its_manifest_says(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.zst"
    outcome = kvctl("debug", "bundle", str(path))
    assert outcome.code == 0
    files, manifest = unpacked(path), told(path)
    expected = {RECORDING, "host.txt", debug_bundle.HOST, *(text.name for text in debug_bundle.TEXTS)}
    # Nothing was found, so nothing explains it.
    assert {"manifest.json", *expected} - files.keys() <= {"findings.txt"}
    assert [each["name"] for each in manifest["files"]] == [name for name in files if name != "manifest.json"]
    assert (manifest["partial"], manifest["redacted"], manifest["agents"]) == (False, False, 4)
    assert manifest["failed"] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["b.tar.zst"]
    with io.BytesIO(files[RECORDING]) as file:
        kinds = {frame.kind for frame in form.read_frames(file)}
    assert kinds == {form.HEAD, form.MOMENT, form.ANSWERS}


def test_its_tables_are_those_that_live_agents_and_the_file_itself_show(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.tar.zst"
    kvctl("debug", "bundle", str(path))
    monkeypatch.setenv("COLUMNS", "160")
    files = unpacked(path)
    for name, *args in (
        ("rooms.txt", "rooms"),
        ("staging.txt", "staging"),
        ("peers.txt", "peers"),
        ("layers.txt", "layers"),
    ):
        text = files[name].decode()
        assert text == kvctl(*args, "-o", "wide").out
        assert text == kvctl(*args, "-o", "wide", "--from", str(path)).out
    assert files["metrics.prom"].decode() == kvctl("metrics", "-o", "prom").out


def test_show_lists_it_and_finds_what_was_changed(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.zst"
    kvctl("debug", "bundle", str(path), "--redact")
    shown = kvctl("debug", "show", str(path), "-o", "json")
    assert shown.code == 0
    assert [row["file"] for row in shown.data] == [each["name"] for each in told(path)["files"]]
    assert "made by kvctl 0.1.0 at " in shown.err
    assert ", redacted\n" in shown.err
    recording = tmp_path / "r.kvrec"
    kvctl("record", str(recording))
    refused = kvctl("debug", "show", str(recording))
    assert (refused.code, refused.out) == (1, "")
    assert "it is not a bundle of kvctl: create one with kvctl debug bundle" in refused.err
    path.write_bytes(path.read_bytes()[:500])
    assert kvctl("debug", "show", str(path)).code == 1


SECRETS = ("node7.rack", "lovelace", "/homes/lovelace", "10.9.8.7", "gpu-b12", "/srv/models", KEY, "fd00::7")


@pytest.fixture
def telling(start: Any, canned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents with names, addresses, paths and keys in all kinds of fields."""
    monkeypatch.setattr(redaction, "_hosts", lambda: ["node7.rack", "node7"])
    monkeypatch.setattr(redaction, "_users", lambda: ["lovelace"])

    def events(_: Any) -> Any:
        texts = ["tcp://gpu-b12:7000 hung up", "gpu-b12 again", f"key {KEY}", "lovelace@node7.rack of [fd00::7]:9"]
        rows = [{**canned.events("decode-0")[0], "sequence": n, "text": text} for n, text in enumerate(texts)]
        return {"events": rows, "next": 4, "dropped": 0}

    def history(_: Any) -> Any:
        cause = {
            "rank": "prefill-0",
            "code": "transport",
            "at_ns": canned.NOW,
            "text": "10.9.8.7: /homes/lovelace/x is gone",
        }
        row = canned.room_row("decode-0", "5", state="Failed", finished_at_ns=canned.NOW, failure=cause)
        return [row]

    def room(_: Any) -> Any:
        event = canned.event(1, "decode-0", "fail", peer="node7-prefill-0", detail="/srv/models/a b.bin")
        return [{**canned.room_detail("decode-0"), "timeline": [event]}]

    def config(_: Any) -> Any:
        row = {**canned.config("decode-0")[0], "key": "fleet_key", "value": "/homes/lovelace/my keys/f.key"}
        return [{**row, "origin": "file /homes/lovelace/agent.toml"}]

    peers = [
        {
            **canned.peers("decode-0")[0],
            "peer": "node7-prefill-0",
            "endpoint": "tcp://10.9.8.7:1",
            "last_error": "lovelace",
        }
    ]
    start("decode-0", {"events": events, "history": history, "room": room, "config": config, "peers": lambda _: peers})
    start("node7-prefill-0", canned.answers("prefill-0"))


def everything(path: Path) -> str:
    """Returns all contents of a bundle as text, decompressed."""
    moments = load(path)
    inside = "".join(json.dumps(moments[index].document(), ensure_ascii=False) for index in range(len(moments)))
    rest = "".join(data.decode() for name, data in unpacked(path).items() if name != RECORDING)
    return inside + rest


def test_redaction_leaves_no_name_of_a_machine_a_person_a_place_or_a_key(
    telling: None, kvctl: Any, tmp_path: Path
) -> None:
    plain, path = tmp_path / "plain.tar.zst", tmp_path / "red.tar.zst"
    assert kvctl("debug", "bundle", str(plain)).code == 0
    outcome = kvctl("debug", "bundle", str(path), "--redact")
    assert outcome.code == 0
    before, text = everything(plain), everything(path)
    for secret in (*SECRETS, os.environ["KVCTL_SOCKET_DIR"], str(tmp_path)):
        assert secret in before or secret == str(tmp_path)
        assert secret not in text
    assert all(f"{kind}-1" in text for kind in ("host", "user", "path", "key", "address"))
    shown = kvctl("agents", "--from", str(path), "--columns", "agent,state", "-o", "tsv")
    assert (shown.code, shown.out) == (0, "agent\tstate\ndecode-0\tok\nhost-2-prefill-0\tok\n")
    for args in (("rooms", "-o", "tsv"), ("staging", "-o", "csv"), ("metrics", "-o", "yaml")):
        redacted, live = kvctl(*args, "--from", str(path)).out, kvctl(*args).out
        redacted, live = (re.sub(r"generated_at_ns: \d+", "", text) for text in (redacted, live))
        live = live.replace("node7-prefill-0", "host-2-prefill-0").replace("cmpl-7f3a", "request-1")
        assert redacted == live


def test_an_older_bundle_is_redacted_from_its_file(telling: None, kvctl: Any, tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.tar.zst", tmp_path / "red.tar.zst"
    kvctl("debug", "bundle", str(plain))
    assert kvctl("debug", "bundle", "--from", str(plain), "--redact", str(path)).code == 0
    text = everything(path)
    assert not [secret for secret in SECRETS if secret in text]
    assert load(path).at_ns == load(plain).at_ns
    # This machine is not the one that the file tells of.
    assert debug_bundle.HOST not in unpacked(path)


def test_an_agent_that_hangs_and_one_that_refuses_hold_nobody_up(
    start: Any, socket_directory: Path, kvctl: Any, tmp_path: Path
) -> None:
    start("decode-0")
    start("prefill-0", {"staging": refusal()})
    path = tmp_path / "b.tar.zst"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(socket_directory / "decode-1.sock"))
        hung.listen()
        outcome = kvctl("debug", "bundle", str(path), "--timeout", "1s")
    assert outcome.code == 7
    assert "decode-1: no answer within" in outcome.err
    assert [fault["agent"] for fault in told(path)["errors"]] == ["decode-1"]
    shown = kvctl("staging", "--from", str(path))
    assert shown.code == 7
    assert "prefill-0: boom" in shown.err


def test_sockets_whose_names_are_no_text_hold_nothing_up(
    start: Any, socket_directory: Path, kvctl: Any, tmp_path: Path
) -> None:
    start("decode-0")
    path = tmp_path / "b.tar.zst"
    odd = socket_directory / os.fsdecode(b"odd-\xff.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.fsencode(odd))
    outcome = kvctl("debug", "bundle", str(path))
    assert outcome.code == 0
    assert "not in the bundle" not in outcome.err
    shown = kvctl("agents", "--from", str(path), "--columns", "agent,state", "-o", "tsv").out
    assert "odd-\\udcff\tstale" in shown.replace("\\\\", "\\")


def test_without_agents_there_is_still_this_machine(kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.tar.zst"
    outcome = kvctl("debug", "bundle", str(path))
    assert outcome.code == 3
    assert "no agent answered" in outcome.err
    assert unpacked(path).keys() == {RECORDING, "host.txt", debug_bundle.HOST, "manifest.json"}
    assert json.loads(unpacked(path)["host.json"])["cores"]
    assert kvctl("status", "--from", str(path)).code == 3


@pytest.mark.parametrize("redact", [(), ("--redact",)])
@pytest.mark.parametrize("step", ["asking the agents", "rooms.txt", debug_bundle.HOST])
def test_ctrl_c_leaves_a_bundle_that_can_be_read(
    step: str, redact: tuple[str, ...], fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(_: Any, text: str) -> None:
        if text == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Output, "detail", say)
    path = tmp_path / "b.tar.zst"
    outcome = kvctl("debug", "bundle", str(path), *redact)
    assert outcome.code == 130
    assert told(path)["partial"] is True
    assert [each.name for each in tmp_path.iterdir()] == ["b.tar.zst"]
    shown = kvctl("debug", "show", str(path))
    assert shown.code == 0
    assert "partial" in shown.err
    assert kvctl("status", "--from", str(path)).code == (1 if step == "asking the agents" else 0)


def test_ctrl_c_while_agents_are_asked_keeps_what_was_said(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder.time, "sleep", interrupted)
    monkeypatch.setattr(debug_bundle, "_APART_NS", 3600 * 10**9)
    path = tmp_path / "b.tar.zst"
    for redact in ((), ("--redact",)):
        assert kvctl("debug", "bundle", str(path), *redact).code == 130
        assert told(path)["partial"] is True
        assert kvctl("status", "--from", str(path)).code == 0
    path = tmp_path / "series.kvrec"
    outcome = kvctl("record", str(path), "--for", "1h")
    assert outcome.code == 130
    assert "1 snapshot saved" in outcome.err
    assert kvctl("status", "--from", str(path)).code == 0


def test_an_interrupt_that_comes_last_loses_nothing(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Archive.end

    def late(self: Archive, about: dict[str, Any]) -> None:
        end(self, about)
        raise KeyboardInterrupt

    monkeypatch.setattr(Archive, "end", late)
    path = tmp_path / "b.tar.zst"
    assert kvctl("debug", "bundle", str(path)).code == 130
    assert kvctl("debug", "show", str(path)).code == 0


def test_one_command_that_fails_costs_its_own_file_only(
    fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = debug_bundle.Text("wrong.txt", ("rooms", "--columns", "speed"), "nothing")
    monkeypatch.setattr(debug_bundle, "TEXTS", (wrong, *debug_bundle.TEXTS[:1]))
    path = tmp_path / "b.tar.zst"
    outcome = kvctl("debug", "bundle", str(path))
    assert outcome.code == 0
    assert "not in the bundle: wrong.txt: " in outcome.err
    assert "speed" in told(path)["failed"][0]
    assert "status.txt" in unpacked(path)


def test_what_cannot_be_written_leaves_nothing(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    outcome = kvctl("debug", "bundle", str(tmp_path / "no" / "where.tar.zst"))
    assert outcome.code == 1
    assert "cannot write" in outcome.err
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    outcome = kvctl("debug", "bundle", str(pipe))
    assert outcome.code == 1
    assert "is not a regular file" in outcome.err
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]
