"""Faults of the network between four hosts under load, which `kvctl doctor` names with the two hosts.

Rooms fail in time and by name, or go on; no byte is wrong, nothing hangs, and after healing all pairs serve in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvctl.lab.demo.room_accounting import LiveRoom
from tests.network.conftest import DEADLINE_S, LOST_S, PLACE, Site

EVERY = pytest.mark.parametrize("site", ["nixl", "mooncake"], indirect=True, scope="module")
# Agents lose each other in the same way whatever moves the bytes.
NIXL = pytest.mark.parametrize("site", ["nixl"], indirect=True, scope="module")
pytestmark = pytest.mark.usefixtures("as_before")

# What the engines' connections have and those of the agents do not.
DATA_PORTS = "tcp dport != { 7000, 7001, 7311 } tcp sport != { 7000, 7001, 7311 }"
CONTROL_PORTS = "tcp dport { 7000, 7001 }"


def named(site: Site, codes: str, subject: str, *words: str) -> dict[str, Any]:
    """Waits until `kvctl doctor` has a finding with this subject, and all words in its cause or remedy.

    Args:
        codes: its code, or several that are as true, separated by " or ".
    """
    seen: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []

    def shown() -> bool:
        site.load.run(1.0)  # nothing is opened while kvctl runs
        seen[:] = site.fleet.kvctl("doctor")
        found[:] = [row for row in seen if row.get("code") in codes.split(" or ") and row["subject"] == subject]
        return any(all(word in row["cause"] + row["remedy"] for word in words) for row in found)

    try:
        site.until(shown, f"doctor says {codes} {subject}: {', '.join(words)}")
    except Exception as error:
        raise AssertionError(f"{error}; {[(row.get('code'), row['subject'], row['cause']) for row in seen]}") from error
    print(f"{found[0]['code']}: {found[0]['cause']}")
    return found[0]


def ended_in_time(site: Site, rooms: list[LiveRoom]) -> None:
    """Waits until rooms have ended on every rank; a rank that is cut off may need both of its deadlines."""
    site.until(lambda: all(room.ends.keys() >= set(room.ranks) for room in rooms), "the rooms end on every rank")
    slack_s = 15.0  # of two busy cores
    for room in rooms:
        took_s = (room.ended_ns - room.opened_ns) / 1e9
        assert took_s < 2 * DEADLINE_S + LOST_S + slack_s, (room.number, took_s)


def fails_by_name(site: Site, room: LiveRoom, names: set[str]) -> None:
    """A room fails in time, and its first cause names one of the agents at the ends of the fault."""
    ended_in_time(site, [room])
    cause = room.first_cause
    assert cause is not None
    assert any(name in cause["text"] or name == cause["rank"] for name in names), cause
    print(f"{cause['code']}: {cause['text']}")


# ---- the network is slow ---------------------------------------------------------------------------------------------


@EVERY
def test_a_delay_slows_rooms_and_fails_none(site: Site) -> None:
    failed = site.load.accounting.failed
    site.network.delay("n4", 0.05)
    print(f"{site.rate(3.0):.1f} MB/s with 50 ms more to and from n4")
    healed = {row["peer"]: row["rtt_ns"] for row in site.fleet.kvctl("peers") if row["agent"] == "prefill-0"}
    assert healed["decode-1"] > 90e6
    assert site.load.accounting.failed == failed


@EVERY
def test_lost_packets_slow_rooms_and_fail_none(site: Site) -> None:
    failed = site.load.accounting.failed
    site.network.lose("n1", "n3", 3)
    site.network.lose("n3", "n1", 3)
    print(f"{site.rate(3.0):.1f} MB/s with 3 % lost between n1 and n3")
    assert site.load.accounting.failed == failed


@EVERY
def test_a_limited_rate_is_a_slow_link(site: Site) -> None:
    site.network.limit_rate("n4", 8)
    row = named(site, "KV_LANE_SLOW", "n1 and n2 → n4", "the network of n4")
    assert {"prefill-0", "prefill-1", "decode-1"} == set(row["agents"])


# ---- the network is cut ----------------------------------------------------------------------------------------------


@NIXL
def test_a_short_cut_fails_no_room(site: Site) -> None:
    """Rooms wait: it is over before anybody is given up."""
    failed = site.load.accounting.failed
    site.network.part("n1", "n3")
    site.load.run(LOST_S / 3)
    site.network.heal()
    assert site.load.accounting.failed == failed


@NIXL
@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        ("n1", "n3", "those of n3 arrive at n1, whose answers get lost"),
        ("n3", "n1", "connections from n3 to n1 are not answered"),
    ],
)
def test_a_cut_in_one_direction_is_named_with_its_direction(site: Site, source: str, target: str, words: str) -> None:
    room = site.load.open(512, decode_dp=0, gap_s=60.0)
    site.load.run(0.5)
    site.network.drop(source, target)
    fails_by_name(site, room, {"prefill-0", "decode-0"})
    named(site, "KV_PEER_LOST", f"{source} → {target}", words, f"on {source}")


@EVERY
def test_a_cut_in_both_directions_quarantines_until_it_heals(site: Site) -> None:
    room = site.load.open(512, decode_dp=0, gap_s=60.0)
    site.load.run(0.5)
    site.network.part("n1", "n3")
    fails_by_name(site, room, {"prefill-0", "decode-0"})
    named(site, "KV_PEER_LOST", "n3 → n1", "ping -c 3")
    assert set(site.kept()) <= {"decode-0"}
    others = [each for each in site.load.accounting.rooms.values() if each.decode_dp == 1 and each.succeeded]
    assert others, "rooms of the other decode rank go on"


@NIXL
def test_a_host_that_is_cut_off_from_all_is_one_finding(site: Site) -> None:
    room = site.load.open(512, decode_dp=0, gap_s=60.0)
    site.load.run(0.5)
    site.network.isolate("n3")
    fails_by_name(site, room, {"decode-0"})
    named(site, "KV_PEER_LOST", "n3 → n1 and n2", "decode-0", "ping -c 3")


# ---- some packets pass -----------------------------------------------------------------------------------------------


def blocked(site: Site, fault: Callable[[], None], *words: str) -> None:
    """Bytes from n1 to n3 do not pass and messages do: rooms end at their deadline, by name, and doctor tells why."""
    site.load.run(0.5)
    fault()
    room = site.load.open(512, decode_dp=0)
    fails_by_name(site, room, {"prefill-0", "decode-0"})
    # Where an agent introduces itself again, its large message does not pass either: then the peer is lost.
    named(site, "KV_DATA_BLOCKED or KV_PEER_LOST", "n1 → n3", *words)


@EVERY
def test_a_filtered_data_port(site: Site) -> None:
    blocked(site, lambda: site.network.drop("n1", "n3", DATA_PORTS), "the port is filtered")


@EVERY
def test_packets_that_are_too_large(site: Site) -> None:
    """Small rooms on small messages pass; their bytes do not."""
    site.load.closed = True
    try:
        blocked(site, lambda: site.network.limit_packets("n1", "n3"), "ping -c 3 -M do -s 1472")
    finally:
        site.load.closed = False


@NIXL
def test_a_filtered_control_port(site: Site) -> None:
    site.network.drop("n3", "n1", CONTROL_PORTS)
    named(site, "KV_PEER_LOST", "n3 → n1", "a firewall", "ping -c 3")


# ---- a host is gone --------------------------------------------------------------------------------------------------


@EVERY
def test_a_host_that_disappears_is_told_by_its_silence_and_serves_again_when_it_is_back(site: Site) -> None:
    """Without FIN or RST: its link goes down, then its process is killed."""
    victim, host = "decode-1", PLACE["decode-1"]
    room = site.load.open(512, decode_dp=1, gap_s=60.0)
    site.load.run(0.5)
    site.network.unplug(host)
    began = time.monotonic()
    site.load.kill(victim)
    site.until(lambda: all(name in room.ends for name in set(room.ranks) - {victim}), "the room ends on the others")
    cause = room.first_cause
    assert cause is not None
    assert victim in cause["text"], cause
    print(f"told after {time.monotonic() - began:.1f} s: {cause['text']}")
    named(site, "KV_PEER_LOST", "n4 → n1 and n2", "decode-1")
    site.network.heal()
    site.load.restart(victim)
    site.until(lambda: site.fleet.ranks[victim].serving, f"{victim} serves again")
