"""Codes about the network between two hosts: one finding for each pair of hosts, however many ranks they have."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from kvctl.client.faults import Fault
from kvctl.health.codes.network import Interruption
from kvctl.health.codes.nics import _shows
from kvctl.health.finding import Finding, Severity
from tests.kvctl.health.fleets import MS, Fleet, S

HOSTS = {"prefill-0": "n1", "prefill-1": "n2", "decode-0": "n3", "decode-1": "n4"}
ADDRESSES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3", "n4": "10.0.0.4"}


def spread(hosts: dict[str, str] = HOSTS) -> Fleet:
    """A healthy fleet on several hosts."""
    fleet = Fleet()
    for name, answers in fleet.answers.items():
        fleet.status(name, host=hosts[name])
        for row in answers["peers"]:
            host = hosts[row["peer"]]
            row.update(peer_host=host, same_host=False, address=ADDRESSES[host], tcp=None, unheard_ns=300 * MS)
            row.update(wire_ns=6 * MS, oldest_write_ns=None)
    return fleet


def tcp(**counts: int) -> dict[str, int]:
    known = ("established", "opening", "half_open", "unacknowledged_bytes", "retransmits")
    return dict.fromkeys(known, 0) | counts


def cut(fleet: Fleet, one: str, other: str, at_one: dict[str, int], at_other: dict[str, int]) -> None:
    for name, peer, connections in ((one, other, at_one), (other, one, at_other)):
        error = f"peer {peer} (incarnation 0f) lost: silent for 15 s"
        fleet.peer(name, peer, state="lost", last_heard_ns=20 * S, last_error=error, tcp=connections)


def only(fleet: Fleet, code: str) -> Finding:
    (found,) = fleet.find(code)
    return found


def test_hosts_that_work_have_no_finding() -> None:
    assert [each.code for each in spread().examine()] == []


@pytest.mark.parametrize(
    ("at_prefill", "at_decode", "subject", "words"),
    [
        (tcp(half_open=2), tcp(opening=2), "n1 → n3", "those of n3 arrive at n1, whose answers get lost"),
        (tcp(established=2), tcp(opening=2), "n3 → n1", "connections from n3 to n1 are not answered"),
        (
            tcp(established=3),
            tcp(established=3, unacknowledged_bytes=13_506, retransmits=4),
            "n3 → n1",
            "large packets are lost on the way",
        ),
        (
            tcp(established=3, unacknowledged_bytes=13_506, retransmits=4),
            tcp(established=3),
            "n1 → n3",
            "large packets are lost on the way",
        ),
    ],
)
def test_the_connections_tell_which_way_packets_get_lost(
    at_prefill: dict[str, int], at_decode: dict[str, int], subject: str, words: str
) -> None:
    fleet = spread()
    cut(fleet, "prefill-0", "decode-0", at_prefill, at_decode)
    found = only(fleet, "KV_PEER_LOST")
    assert (found.subject, found.severity) == (subject, Severity.CRITICAL)
    assert found.cause.startswith(f"{subject}: ")
    assert words in found.cause
    assert set(found.agents) == {"prefill-0", "decode-0"}
    target = subject.rpartition(" ")[2]
    assert ADDRESSES[target] in found.remedy
    assert ("-M do -s 1472" in found.remedy) == ("large" in words)


def test_what_one_side_alone_reports_is_enough() -> None:
    """The writer still hears the decode rank, which does not hear it."""
    fleet = spread()
    fleet.peer("decode-0", "prefill-0", state="lost", last_heard_ns=20 * S, last_error="lost: silent", tcp=tcp())
    stalled = tcp(established=3, unacknowledged_bytes=9_000, retransmits=5)
    fleet.peer("prefill-0", "decode-0", unheard_ns=20 * S, tcp=stalled)
    assert only(fleet, "KV_PEER_LOST").subject == "n1 → n3"


def test_many_ranks_of_two_hosts_are_one_finding() -> None:
    fleet = spread(dict(HOSTS, **{"prefill-1": "n1", "decode-1": "n3"}))
    for prefill in ("prefill-0", "prefill-1"):
        for decode in ("decode-0", "decode-1"):
            cut(fleet, prefill, decode, tcp(half_open=1), tcp(opening=1))
    found = only(fleet, "KV_PEER_LOST")
    assert (found.subject, found.weight) == ("n1 → n3", 8)


def test_a_host_that_nobody_hears_is_one_finding() -> None:
    fleet = spread(dict(HOSTS, **{"decode-1": "n3"}))
    for name in ("decode-0", "decode-1"):
        fleet.gone(name)
        fleet.faults.append(Fault(f"10.0.0.3:{name[-1]}", "timeout", "no answer within 2 s"))
        for prefill in ("prefill-0", "prefill-1"):
            error = f"peer {name} (incarnation 0f) lost: silent for 15 s"
            fleet.peer(prefill, name, state="lost", last_heard_ns=20 * S, last_error=error)
    found = only(fleet, "KV_PEER_LOST")
    assert (found.subject, found.severity) == ("n3 → n1 and n2", Severity.CRITICAL)
    assert "decode-0 and decode-1" in found.cause
    assert "ping -c 3 10.0.0.3" in found.remedy


def blocked(fleet: Fleet, **changes: Any) -> None:
    row: dict[str, Any] = {"state": "ready", "oldest_write_ns": 9 * S, "last_heard_ns": 200 * MS, "rtt_ns": 2 * MS}
    fleet.peer("prefill-0", "decode-0", **row | changes)


@pytest.mark.parametrize(
    ("connections", "words", "command"),
    [
        (tcp(established=1, opening=2), "2 connections to n3 got no answer", "ss -tn state syn-sent"),
        (
            tcp(established=3, unacknowledged_bytes=1 << 20, retransmits=5),
            "1 MiB were sent 5 times again",
            "ping -c 3 -M do -s 1472 10.0.0.3",
        ),
    ],
)
def test_bytes_that_do_not_pass_while_messages_do(connections: dict[str, int], words: str, command: str) -> None:
    fleet = spread()
    blocked(fleet, tcp=connections)
    found = only(fleet, "KV_DATA_BLOCKED")
    assert (found.subject, found.severity) == ("n1 → n3", Severity.CRITICAL)
    assert words in found.cause
    assert command in found.remedy


def test_the_size_of_the_test_packet_is_that_of_the_interface() -> None:
    fleet = spread()
    fleet.answers["prefill-0"]["nics"] = {
        "host": "n1",
        "nics": [{"name": "eth0", "kind": "interface", "link": "Ethernet", "state": "up", "mtu": 9000}],
    }
    blocked(fleet, address="fd00::3", tcp=tcp(established=3, unacknowledged_bytes=1 << 20, retransmits=5))
    assert "ping -c 3 -M do -s 8952 fd00::3" in only(fleet, "KV_DATA_BLOCKED").remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"tcp": tcp(established=3)},  # a large write over a slow connection, of which all is acknowledged
        {"tcp": tcp(established=3, unacknowledged_bytes=9_000, retransmits=1)},  # a packet was lost
        {"tcp": tcp(opening=1), "oldest_write_ns": 800 * MS},
        {"tcp": None},
        {"tcp": tcp(opening=1), "peer_host": "n1"},
    ],
)
def test_slow_writes_are_not_blocked(changes: dict[str, Any]) -> None:
    fleet = spread()
    blocked(fleet, **changes)
    assert fleet.find("KV_DATA_BLOCKED") == []


def slow_links(fleet: Fleet, *pairs: tuple[str, str]) -> None:
    for writer, reader in pairs:
        fleet.peer(writer, reader, wire_ns=400 * MS)


def test_one_slow_link_is_named_by_its_hosts() -> None:
    fleet = spread()
    slow_links(fleet, ("prefill-0", "decode-1"))
    found = only(fleet, "KV_LANE_SLOW")
    assert found.subject == "n1 → n4"
    assert "n1 → n4: a part takes 400 ms on the wire, 67 times as long" in found.cause


def test_the_links_of_one_slow_host_are_one_finding() -> None:
    fleet = spread()
    slow_links(fleet, ("prefill-0", "decode-1"), ("prefill-1", "decode-1"))
    found = only(fleet, "KV_LANE_SLOW")
    assert found.subject == "n1 and n2 → n4"
    assert "the network of n4" in found.cause


def test_a_slow_fleet_has_no_slow_link() -> None:
    fleet = spread()
    slow_links(fleet, *((one, other) for one in HOSTS for other in HOSTS if one[0] == "p" and other[0] == "d"))
    assert fleet.find("KV_LANE_SLOW") == []


def test_what_an_agent_calls_its_host_does_nothing_in_a_shell() -> None:
    """A remedy is pasted; hosts and addresses are what peers say."""
    name = "n2; reboot"
    remedies = [Interruption("n1", name, False, large_only, name, ()).remedy for large_only in (True, False)]
    for text in (*remedies, _shows(name)):
        (command,) = re.findall("`(ping .*|kvctl .*)`", text.partition("on n1")[0])
        assert shlex.split(command)[-1].removeprefix("host=") == name
