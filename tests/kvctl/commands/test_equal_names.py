"""Two hosts whose agents have the same names: real agents on TCP with keys, each host with its own socket directory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvctl.commands.context_file import Contexts
from kvctl.lab.tcp_ports import free_port
from kvctl_agent.contract.states import RoomState
from kvctl_agent.parts import PartFactories
from kvctl_agent.telemetry.clock import Clock
from tests.kvctl.client.discovery.conftest import keys
from tests.support.agents import Fleet, make_fleet

__all__ = ["keys", "make_fleet"]

AHEAD_NS = {"n1": 0, "n2": 900_000_000}
MEASURED_WITHIN_NS = 400_000_000  # on a busy machine
BOTH = ("decode-0@n1", "decode-0@n2", "prefill-0@n1", "prefill-0@n2")


@dataclass(frozen=True)
class Hosts:
    """The fleets by host, and the addresses of their agents by (host, name)."""

    fleets: dict[str, Fleet]
    addresses: dict[tuple[str, str], str]


def shifted_clock(ahead_ns: int) -> Callable[[], Clock]:
    def make() -> Clock:
        clock = Clock()
        clock.offset_ns += ahead_ns
        return clock

    return make


@pytest.fixture
def hosts(make_fleet: Any, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts n1 and n2, each with prefill-0 and decode-0 that are peers; a context `prod` names their addresses."""
    clients = tmp_path / "clients"
    clients.touch(0o600)
    clients.write_text(f"operate {(keys / 'default.pub').read_text()}")
    fleets, addresses = {}, {}
    for host, ahead_ns in AHEAD_NS.items():
        directory = tmp_path / host
        directory.mkdir(mode=0o700)
        monkeypatch.setenv("KVCTL_SOCKET_DIR", str(directory))
        made = fleets[host] = make_fleet(
            prefill=(1, 1),
            host=host,
            fleet_key=str(keys / "fleet.key"),
            admin_clients=str(clients),
            factories=PartFactories(clock=shifted_clock(ahead_ns)),
        )
        made.bootstrap = f"tcp://127.0.0.1:{free_port()}"
        for create, agents in ((made.prefill_agent, made.prefill), (made.decode_agent, made.decode)):
            address = f"tcp://127.0.0.1:{free_port()}"
            agents.append(create(0, admin_endpoint=address).start())
            addresses[host, agents[0].name] = address
        made.decode[0].wait_ready(60)
        made.run(7, 8)
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(tmp_path / "nobody"))
    context = {"endpoint": list(addresses.values()), "server_key": str(keys / "fleet.pub")}
    Contexts(keys.with_name("contexts.json"), "prod", {"prod": context}).save()
    yield Hosts(fleets, addresses)
    for made in fleets.values():
        made.settle()


def rows(outcome: Any, code: int = 0) -> list[dict[str, Any]]:
    assert outcome.code == code, outcome
    found: list[dict[str, Any]] = outcome.data
    return found


def test_agents_of_equal_names_are_told_apart_in_every_command(hosts: Hosts, kvctl: Any, tmp_path: Path) -> None:
    assert tuple(row["agent"] for row in rows(kvctl("agents", "-o", "json"))) == BOTH
    found = rows(kvctl("status", "-o", "json"))
    assert {row["name"]: (row["host"], row["instance"], row["health"]) for row in found} == {
        "decode-0@n1": ("n1", "decode-0@n1", []),
        "decode-0@n2": ("n2", "decode-0@n2", []),
        "prefill-0@n1": ("n1", "prefill-0@n1", []),
        "prefill-0@n2": ("n2", "prefill-0@n2", []),
    }
    pairs = {(row["agent"], row["peer"]) for row in rows(kvctl("peers", "-o", "json"))}
    assert pairs == {(f"{a}-0@{host}", f"{b}-0@{host}") for host in AHEAD_NS for a, b in (PAIR, PAIR[::-1])}
    history = rows(kvctl("rooms", "history", "-o", "json"))
    assert {(row["agent"], *row["peers"]) for row in history} == pairs
    recording = str(tmp_path / "fleet.kvrec")
    assert kvctl("record", recording, "--for", "1s").code == 0
    for arguments in (["-e", "decode-0@n2"], ["-e", "decode-0", "-l", "host=n2"]):
        for source in ([], ["--from", recording]):
            (row,) = rows(kvctl("status", *arguments, *source, "-o", "json"))
            assert (row["name"].partition("@")[0], row["host"]) == ("decode-0", "n2")
    assert len(rows(kvctl("status", "--from", recording, "-o", "json"))) == 4
    assert len(rows(kvctl("status", "-e", "decode-0", "-o", "json"))) == 2
    missing = kvctl("status", "-e", "decode-0@n3", "-o", "json")
    assert (missing.code, "among the 4 that answered, did you mean decode-0@n" in missing.err) == (3, True)


PAIR = ("prefill", "decode")


def test_changes_reach_only_the_named_agent(hosts: Hosts, kvctl: Any) -> None:
    assert kvctl("drain", "decode-0@n2", "--yes").code == 0
    draining = {row["name"]: row["draining"] for row in rows(kvctl("status", "-o", "json"))}
    assert draining == {name: name == "decode-0@n2" for name in BOTH}
    (finding,) = rows(kvctl("health", "--filter", "code=KV_DRAINING", "-o", "json"))
    assert finding["agents"] == ["decode-0@n2"]
    command = finding["remedy"].split("`")[1].split()
    assert command == ["kvctl", "resume", "decode-0@n2"]
    assert kvctl(*command[1:], "--yes").code == 0
    assert not any(row["draining"] for row in rows(kvctl("status", "-o", "json")))


CLOCK = re.compile(r"clocks: n2 \+\d+(?:\.\d+)? ms ± \d+(?:\.\d+)? (?:ms|µs), corrected")


def test_the_clock_of_a_host_is_measured_and_corrected(hosts: Hosts, kvctl: Any, tmp_path: Path) -> None:
    found = {row["host"]: row for row in rows(kvctl("hosts", "-o", "json"))}
    for host, ahead_ns in AHEAD_NS.items():
        offset_ns, error_ns = found[host]["clock_offset_ns"], found[host]["clock_error_ns"]
        assert abs(offset_ns - ahead_ns) <= error_ns < MEASURED_WITHIN_NS, found[host]
    clocks = {row["agent"]: row["clock_offset_ns"] for row in rows(kvctl("agents", "-o", "json"))}
    assert clocks["decode-0@n2"] == clocks["prefill-0@n2"], "agents of a host share its clock"
    shown = kvctl("rooms", "show", "7", "--perfetto", str(tmp_path / "room.json"))
    assert CLOCK.search(shown.out), shown.out
    assert shown.out.count("clocks:") == 1, "the room on n1 needs no correction"
    trace = json.loads((tmp_path / "room.json").read_text())["otherData"]["clocks"]
    assert trace.startswith("n2 +") or trace == "none differs"


def test_events_of_hosts_are_merged_on_one_clock(hosts: Hosts, kvctl: Any) -> None:
    ran: dict[str, tuple[int, int]] = {}
    for number in range(100, 104):
        fleet = hosts.fleets[("n2", "n1")[number % 2]]
        before_ns = time.time_ns()
        room = fleet.claim(fleet.receive(fleet.room(number, 2)))
        room.sends[0].abort("to have an event")
        assert room.wait() == {RoomState.FAILED}
        ran[str(number)] = before_ns, time.time_ns()
    outcome = kvctl("events", "-o", "json")
    assert CLOCK.search(outcome.err), outcome.err
    found = [row for row in rows(outcome) if row["room"] in ran]
    assert {row["agent"] for row in found} == set(BOTH)
    for row in found:
        before_ns, after_ns = ran[row["room"]]
        assert before_ns - MEASURED_WITHIN_NS < row["at_ns"] < after_ns + MEASURED_WITHIN_NS, row
