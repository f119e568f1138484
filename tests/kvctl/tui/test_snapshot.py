"""`kvctl top --snapshot`: one screen of live agents or of a recording in a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("view", ["overview", "events"])
def test_text_has_the_size_that_was_asked_for(view: str, fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "screen.txt"
    outcome = kvctl(
        "top", "--snapshot", str(path), "--view", view, "--size", "100x30", "--interval", "100ms", "--timeout", "20s"
    )
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    lines = path.read_text().splitlines()
    assert len(lines) == 30
    assert max(map(len, lines)) <= 100
    assert "prefill-0" in path.read_text()


def test_filters_and_order_of_the_command_line_hold(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "screen.txt"
    outcome = kvctl(
        "top", "--snapshot", str(path), "--view", "rooms", "--interval", "100ms", "--timeout", "20s",
        "--filter", "state=WaitingForInput", "--filter", "role=decode", "--sort-by", "-agent",
    )  # fmt: skip
    assert outcome.code == 0
    rooms = [line.split()[:2] for line in path.read_text().splitlines() if "WaitingForInput  " in line]
    assert [each[-2:] for each in rooms] == [["▸", "7"], ["7", "decode-0"]]
    assert "2 of 8  filter state=WaitingForInput & role=decode" in path.read_text()


def test_no_agent_is_an_error_and_the_picture_shows_it(kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "screen.txt"
    outcome = kvctl("top", "--snapshot", str(path), "--interval", "100ms", "--timeout", "20s")
    assert outcome.code == 3
    assert "Start some here: kvctl demo" in outcome.err
    assert "Start some here: kvctl demo" in path.read_text()


def test_a_file_that_cannot_be_written_is_named(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    outcome = kvctl("top", "--snapshot", str(tmp_path / "no" / "screen.txt"), "--interval", "100ms", "--timeout", "20s")
    assert outcome.code == 1
    assert "screen.txt: No such file or directory" in outcome.err


def test_a_snapshot_shows_rates_of_live_agents_and_of_a_recording(fleet: Any, kvctl: Any, tmp_path: Path) -> None:
    recording, path = tmp_path / "fleet.kvrec", tmp_path / "screen.txt"
    assert kvctl("record", str(recording), "--for", "2500ms", "--every", "1500ms").code == 0
    for source in ((), ("--from", str(recording))):
        assert kvctl("top", *source, "--snapshot", str(path), "--interval", "600ms", "--timeout", "20s").code == 0
        assert re.search(r"rooms/s +\d", path.read_text())
    assert "fleet.kvrec: snapshot 3 of 3" in path.read_text()


def test_an_unreadable_recording_is_one_line(kvctl: Any, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"nothing")
    outcome = kvctl("top", "--from", str(tmp_path / "broken"), "--snapshot", str(tmp_path / "screen.txt"))
    assert outcome.code != 0
    assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "screen.txt").exists()


def test_free_text_is_no_filter_of_the_command_line(kvctl: Any, tmp_path: Path) -> None:
    assert kvctl("top", "--snapshot", str(tmp_path / "screen.txt"), "--filter", "decode-0").code == 2


@pytest.mark.parametrize(
    ("args", "why"), [(("--filter", "aeg>5s"), "no column 'aeg'"), (("--sort-by", "nothing"), "no column 'nothing'")]
)
def test_what_does_not_fit_the_view_is_refused(
    args: tuple[str, ...], why: str, fleet: Any, kvctl: Any, tmp_path: Path
) -> None:
    outcome = kvctl("top", "--view", "rooms", "--snapshot", str(tmp_path / "screen.txt"), *args)
    assert outcome.code == 2
    assert why in outcome.err


def test_text_of_agents_is_never_drawn_raw(start: Any, canned: Any, kvctl: Any, tmp_path: Path) -> None:
    hostile = "owned\x1b]0;x\x07\x9b\u202e\u200b"
    event = {**canned.events("decode-0")[0], "text": hostile, "peer": hostile}
    answer = {"events": [event], "next": 2, "dropped": 0}
    start("decode-0", {"events": lambda _: answer, "status": lambda _: canned.status("decode-0") | {"device": hostile}})
    for view in ("overview", "events"):
        for suffix in ("txt", "svg"):
            path = tmp_path / f"{view}.{suffix}"
            args = ("--view", view, "--size", "200x40", "--interval", "100ms", "--timeout", "20s")
            assert kvctl("top", "--snapshot", str(path), *args).code == 0
            drawn = path.read_text()
            assert "owned" in drawn
            assert all(each.isprintable() or each == "\n" for each in drawn)
