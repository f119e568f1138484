"""`kvctl hosts`, and the folded `kvctl status` and `kvctl agents` of fleets on many hosts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
ODD: dict[str, dict[str, Any]] = {
    "decode-1@n4": {"draining": True, "accepting": False},
    "prefill-0@n7": {"version": "0.0.9"},
    "decode-0@n12": {"rate": {"window_ns": 10**10, "bytes": 1 << 20, "gb_per_s": 0.1, "rooms_per_s": 0.4}},
}


@pytest.fixture(autouse=True)
def patience(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows a busy machine to answer late."""
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")


def check(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), name


def test_status_of_many_hosts_on_one_screen(start_hosts: Any, kvctl: Any, terminal: Any) -> None:
    start_hosts(40, ODD)
    for width in (80, 120):
        terminal(width)
        outcome = kvctl("status")
        assert (outcome.code, outcome.err) == (0, "")
        check(f"status-hosts-{width}.txt", outcome.out)
    assert len(outcome.out.splitlines()) <= 24
    rows = json.loads(kvctl("status", "-o", "json").out)["data"]
    assert len(rows) == 80
    assert {(row["host"], row["instance"]) for row in rows if row["name"].endswith("-1@n4")} == {("n4", "decode@n4")}
    assert len(kvctl("status", "-o", "tsv").out.splitlines()) == 81
    assert "prefill-0@n39" in kvctl("status", "--by", "agent").out


@pytest.mark.parametrize("by", ["host", "instance", "role"])
def test_status_by(start_hosts: Any, kvctl: Any, terminal: Any, by: str) -> None:
    start_hosts(12, ODD)
    terminal(120)
    outcome = kvctl("status", "--by", by)
    assert outcome.code == 0, outcome
    check(f"status-by-{by}.txt", outcome.out)


def test_status_of_few_agents_lists_them(start_hosts: Any, kvctl: Any, terminal: Any) -> None:
    start_hosts(4)
    terminal(120)
    assert "AGENT" in kvctl("status").out
    assert "GROUP" in kvctl("status", "--by", "host").out


COLUMNS = "host,up,silent,prefill,decode,instances,device,active,gb_per_s,ring,p99,versions,health"


def test_hosts(start_hosts: Any, kvctl: Any, terminal: Any) -> None:
    start_hosts(12, ODD)
    terminal(120)
    outcome = kvctl("hosts", "--columns", COLUMNS)
    assert (outcome.code, outcome.err) == (0, "")
    check("hosts-120.txt", outcome.out)
    rows = json.loads(kvctl("hosts", "-o", "json").out)["data"]
    assert [row["host"] for row in rows] == ["n4", "n7", "n12", "n1", "n2", "n3", "n5", "n6", "n8", "n9", "n10", "n11"]
    first = rows[0]
    assert (first["decode"], first["draining"], first["instances"]) == (2, 1, ["decode@n4"])
    assert first["health"] == ["KV_DRAINING (1)"] or first["health"] == ["draining (1)"]
    assert 0 < first["rtt_ns"] < 30_000_000_000
    assert abs(first["clock_offset_ns"]) <= first["clock_error_ns"]


def test_one_host(start_hosts: Any, kvctl: Any) -> None:
    start_hosts(4, ODD)
    outcome = kvctl("hosts", "show", "n4")
    assert outcome.code == 0, outcome
    assert outcome.out.startswith("host     n4")
    assert "decode-1@n4" in outcome.out
    assert "decode-1@n2" not in outcome.out
    assert [row["name"] for row in json.loads(kvctl("hosts", "show", "n4", "-o", "json").out)["data"]] == [
        "decode-0@n4",
        "decode-1@n4",
    ]
    wrong = kvctl("hosts", "show", "n44")
    assert (wrong.code, wrong.err) == (1, "kvctl: no agent is on a host n44; did you mean n4?\n")


@pytest.fixture
def mute() -> Iterator[str]:
    """The address of a program that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_completion_of_hosts_and_labels(start_hosts: Any, kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start_hosts(3)
    monkeypatch.setenv("_KVCTL_COMPLETE", "bash")

    def completed(line: str) -> list[str]:
        monkeypatch.setenv("_KVCTL_LINE", line)
        return [item.split("\t")[1] for item in kvctl().out.splitlines()]

    assert completed("kvctl hosts show ") == ["n1", "n2", "n3"]
    assert completed("kvctl status -l role=decode,host=n") == [f"role=decode,host=n{host}" for host in (1, 2, 3)]
    assert completed("kvctl status -l ho") == ["host="]
    assert completed("kvctl status -l role=") == ["role=prefill", "role=decode"]
