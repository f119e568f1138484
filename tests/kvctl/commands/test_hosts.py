"""`kvctl hosts`, and the folded `kvctl status` and `kvctl agents` of fleets on many hosts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.client.faults import timed_out

ODD: dict[str, dict[str, Any]] = {
    "decode-1@n4": {"draining": True, "accepting": False},
    "prefill-0@n7": {"version": "0.0.9"},
    "decode-0@n12": {"rate": {"window_ns": 10**10, "bytes": 1 << 20, "gb_per_s": 0.1, "rooms_per_s": 0.4}},
}


pytestmark = pytest.mark.usefixtures("patience")


def test_status_of_many_hosts_on_one_screen(start_hosts: Any, kvctl: Any, terminal: Any, golden: Any) -> None:
    start_hosts(40, ODD)
    for width in (80, 120):
        terminal(width)
        outcome = kvctl("status")
        assert (outcome.code, outcome.err) == (0, "")
        golden(f"status-hosts-{width}.txt", outcome.out)
    assert len(outcome.out.splitlines()) <= 24
    rows = kvctl("status", "-o", "json").data
    assert len(rows) == 80
    assert {(row["host"], row["instance"]) for row in rows if row["name"].endswith("-1@n4")} == {("n4", "decode@n4")}
    assert len(kvctl("status", "-o", "tsv").out.splitlines()) == 81
    assert "prefill-0@n39" in kvctl("status", "--by", "agent").out


@pytest.mark.parametrize("by", ["host", "instance", "role"])
def test_status_by(start_hosts: Any, kvctl: Any, terminal: Any, golden: Any, by: str) -> None:
    start_hosts(12, ODD)
    terminal(120)
    outcome = kvctl("status", "--by", by)
    assert outcome.code == 0, outcome
    golden(f"status-by-{by}.txt", outcome.out)


COLUMNS = "host,up,silent,prefill,decode,instances,device,active,gb_per_s,ring,p99,versions,health"


def test_hosts(start_hosts: Any, kvctl: Any, terminal: Any, golden: Any) -> None:
    start_hosts(12, ODD)
    terminal(120)
    outcome = kvctl("hosts", "--columns", COLUMNS)
    assert (outcome.code, outcome.err) == (0, "")
    golden("hosts-120.txt", outcome.out)
    rows = kvctl("hosts", "-o", "json").data
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
    assert [row["name"] for row in kvctl("hosts", "show", "n4", "-o", "json").data] == ["decode-0@n4", "decode-1@n4"]
    wrong = kvctl("hosts", "show", "n44")
    assert wrong.code == 1
    assert wrong.err.startswith("kvctl: no agent is on a host n44, did you mean n4")


@pytest.fixture
def with_mute_host(start_hosts: Any, kvctl: Any) -> Iterator[tuple[str, ...]]:
    """Options that select agents of the hosts n1 to n3, and two of 127.0.0.3, which accept connections and are mute."""
    names = start_hosts(3)
    assert kvctl("key", "new").code == 0
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.3", 0))
            listener.listen()
        addresses = [f"tcp://127.0.0.3:{listener.getsockname()[1]}" for listener in (first, second)]
        endpoints = [word for endpoint in (*names, *addresses) for word in ("-e", endpoint)]
        yield (*endpoints, "--server-key", "0" * 64, "--timeout", "3s")


SILENT = timed_out("", 3 * 10**9, local=False).message


def test_a_host_of_which_no_agent_answers_is_one_row(with_mute_host: tuple[str, ...], kvctl: Any) -> None:
    outcome = kvctl("hosts", *with_mute_host, "--columns", "host,up,silent,health", "-o", "tsv")
    assert outcome.out.splitlines()[1:] == ["127.0.0.3\t0\t2\tsilent", *(f"n{host}\t2\t0\tok" for host in (1, 2, 3))]
    assert outcome.err == f"kvctl: host 127.0.0.3 (all 2 agents): {SILENT}\n"
    assert outcome.code == 7
    agents = kvctl("agents", *with_mute_host, "-o", "json")
    assert sorted(row["host"] for row in agents.data) == ["127.0.0.3"] * 2 + [*["n1"] * 2, *["n2"] * 2, *["n3"] * 2]
    shown = kvctl("hosts", "show", "127.0.0.3", *with_mute_host)
    assert "2 silent" in shown.out


def test_check_and_doctor_name_a_silent_host_once(with_mute_host: tuple[str, ...], kvctl: Any) -> None:
    outcome = kvctl("check", "ready", *with_mute_host)
    assert outcome.code == 2
    first, *others = outcome.out.splitlines()
    assert first.startswith(f"KVCTL READY CRITICAL - host 127.0.0.3: 2 of 2 agents silent: {SILENT}")
    assert not any("127.0.0.3" in line for line in others)
    outcome = kvctl("doctor", *with_mute_host, "-o", "json")
    silent = [row for row in outcome.data if row["code"] == "timeout"]
    assert [(row["subject"], len(row["agents"])) for row in silent] == [("host 127.0.0.3", 2)]
    command = silent[0]["next"].split()
    assert command == ["kvctl", "hosts", "show", "127.0.0.3"]


def test_completion_of_hosts_and_labels(start_hosts: Any, kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start_hosts(3)
    monkeypatch.setenv("_KVCTL_COMPLETE", "bash_complete")

    def completed(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(["kvctl", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return [item.split(",", 1)[1] for item in kvctl().out.splitlines()]

    assert completed("hosts", "show", "") == ["n1", "n2", "n3"]
    assert completed("status", "-l", "role=decode,host=n") == [f"role=decode,host=n{host}" for host in (1, 2, 3)]
    assert completed("status", "-l", "ho") == ["host="]
    assert completed("status", "-l", "role=") == ["role=prefill", "role=decode"]
