"""What `-o json` prints of real agents is as docs/json.md has it, for every command that prints JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs import json_schema

PATIENCE_S = 90.0
# They start fleets of their own: their own tests.
NOT_HERE = {"bench", "bench-servers", "demo", "preflight", "tune"}
COMMANDS = """
status; status -e nobody; status -w 1 --from {file}
hosts; agents; agents --prune; rooms; rooms history; rooms slow; rooms failed; rooms show {room}
staging; staging map; layers; peers; peers matrix; peers cost; peers diff prefill-0 decode-0
peers probe --busy prefill-0 decode-0; peers forget nobody -y; nics; bootstrap; metrics; metrics schema; events
config; config show --origin; config explain checksum; config set waiting_timeout_s 200 -y; health
health codes; health explain KV_PEER_LOST; doctor; check
version; stacks; record {file}; debug bundle {bundle}
drain prefill-0 -y; status; agents; check ready; doctor; resume prefill-0 -y; rooms abort {room} -y; rooms failed
rooms failed --by cause
staging release decode-0:1 -y; context ls; key new {key}; demo --list-faults; bench --plan
bench --engine sglang --device cpu --plan
agents -e nobody; logs {log}
"""


@pytest.fixture
def stuck(socket_directory: Path) -> Iterator[None]:
    """A fleet in which a room is stuck."""
    command = [sys.executable, "-m", "kvctl", "demo", "--transport", "loopback", "--fault", "stuck-room", "--seed", "7"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        try:
            yield
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(PATIENCE_S)


def stuck_room(kvctl: Any) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        rows = [json.loads(line) for line in kvctl("rooms", "--filter", "age>1s", "-o", "jsonl").out.splitlines()]
        rooms = {row["room"] for row in rows if row["role"] == "decode" and row["age_ns"] > 3e9}
        if rooms:
            return str(rooms.pop())
        time.sleep(0.2)
    pytest.fail(f"no room has been open for 3 s within {PATIENCE_S:g} s")


def test_every_document_is_as_documented(
    stuck: None, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    assert kvctl("context", "add", "prod", "-e", "tcp://a:7000").code == 0
    names = {
        "file": tmp_path / "x.kvrec",
        "bundle": tmp_path / "y.kvrec",
        "key": tmp_path / "x.key",
        "log": Path(__file__).parents[1] / "logs" / "lines.toml",
    }
    text = COMMANDS.replace("\n", ";").format(room=stuck_room(kvctl), **names)
    commands = [command.split() for command in text.split(";") if command.strip()]
    commands.sort(key=lambda words: "--from" in words)  # after the recording
    seen = set()
    for words in commands:
        outcome = kvctl(*words, "-o", "json")
        assert outcome.out.startswith("{"), (words, outcome.err)
        documents = outcome.out.splitlines() if "-w" in words else [outcome.out]
        for document in map(json.loads, documents):
            assert json_schema.document_conflicts(document) == [], words
            seen.add(document["schema"].removeprefix("kvctl.").removesuffix("/1"))
    assert seen == json_schema.schemas().keys() - NOT_HERE


def test_a_wrong_document_is_found() -> None:
    good: dict[str, Any] = {"schema": "kvctl.hosts/1", "generated_at_ns": 1, "data": [{"health": []}], "errors": []}
    assert json_schema.document_conflicts(good) == []
    for change in (
        {"more": 1},
        {"errors": [{"agent": "a"}]},
        {"schema": "kvctl.nothing/1"},
        {"data": [{}]},
        {"data": [{"health": None}]},
        {"data": [{"health": [], "up": "1"}]},
        {"data": [{"health": [], "more": 1}]},
    ):
        assert json_schema.document_conflicts({**good, **change}), change


def test_a_page_that_breaks_the_promise_of_the_one_before_is_found() -> None:
    page = "### kvctl.x/1\n| `a` | string |  | |\n| `b` | integer or null | ns | |\n| `c` | `x` or `y` | | |\n"
    broken = json_schema.broken_promises
    assert broken(page, page + "| `d` | string | | |\n") == []
    assert broken(page, page.replace("`y`", "`y` or `z`").replace("integer or null", "integer")) == []
    assert broken(page, page.replace("| `a` | string", "| `a2` | string"))
    assert broken(page, page.replace("string", "string or null"))
    assert broken(page, page.replace("integer", "number"))
