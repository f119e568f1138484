"""A real fleet, recorded and redacted."""

from __future__ import annotations

import getpass
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.recordings import load

PATIENCE_S = 90.0
# Decode's ends of finished rooms that had a part to transfer: the demo's prompts may be cached whole.
TRANSFERRED = ("rooms", "history", "-l", "role=decode", "--filter", "parts>0")


@pytest.fixture
def busy(socket_directory: Path) -> Iterator[Path]:
    """A fleet of two ranks that has transferred some rooms."""
    command = [sys.executable, "-m", "kvctl", "demo", "--transport", "loopback", "--prefill-tp", "1"]
    command += ["--decode-dp", "1", "--tokens", "16..64", "--rate", "20"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        try:
            yield socket_directory
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(PATIENCE_S)


def until_rooms_are_done(kvctl: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows = kvctl(*TRANSFERRED, "-o", "jsonl").out.splitlines()
        if len(rows) >= 3:
            return
        time.sleep(0.05)
    pytest.fail(f"no room was done within {PATIENCE_S:g} s")


def everything(path: Path) -> str:
    return "\n".join(json.dumps(each.document(), ensure_ascii=False) for each in load(path))


def test_a_real_fleet_recorded_and_redacted(busy: Path, kvctl: Any, tmp_path: Path) -> None:
    until_rooms_are_done(kvctl)
    plain, path = tmp_path / "plain.kvrec", tmp_path / "red.kvrec"
    assert kvctl("record", str(plain), "--for", "1s").code == 0
    assert kvctl("record", "--from", str(plain), "--redact", str(path)).code == 0
    text = everything(path)
    for secret in (str(busy), str(Path.home()), str(tmp_path), sys.prefix, str(Path(__file__).parents[3])):
        assert secret not in text
    for name in (socket.gethostname(), getpass.getuser()):
        assert re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text) is None
    assert re.search(r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])", text) is None
    assert re.search(r"(?<![\w/.])/\w", text.replace("ipc://", "")) is None
    assert str(busy) in everything(plain)
    # What is no name is as it was; a short name of this machine may be in the midst of a lane's.
    status = ("status", "--columns", "agent,role,rank,done,p50,ring,peers,pid")
    for args in (("rooms", "history"), ("staging",), ("layers",), ("metrics", "-o", "prom"), status):
        assert kvctl(*args, "--from", str(path)).out == kvctl(*args, "--from", str(plain)).out
    # The oldest: both ranks had it when they were asked.
    *_, room = kvctl(*TRANSFERRED, "-o", "json", "--from", str(path)).data
    shown = kvctl("rooms", "show", room["room"], "-o", "json", "--from", str(path)).data
    assert {"ready", "arrive"} <= {event["stage"] for event in shown[0]["timeline"]}
