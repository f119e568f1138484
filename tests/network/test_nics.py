"""What agents tell of their hosts' interfaces: the bytes of rooms are counted there, and lost segments are named."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.network.conftest import PATIENCE_S, PLACE, PREFILL, Site

RANKS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
EVERY = pytest.mark.parametrize("site", ["nixl", "mooncake"], indirect=True, scope="module")


def interfaces(site: Site) -> dict[str, dict[str, Any]]:
    """Returns the row of eth0 of each host with a rank."""
    return {row["host"]: row for row in site.fleet.kvctl("nics") if row["name"] == "eth0"}


@EVERY
def test_the_bytes_of_rooms_leave_through_the_interfaces_of_prefill_hosts(site: Site) -> None:
    before, verified = interfaces(site), site.load.accounting.verified_bytes
    site.rate(2.0)
    moved = site.load.accounting.verified_bytes - verified
    after = interfaces(site)
    grown = {host: after[host]["sent_bytes_total"] - before[host]["sent_bytes_total"] for host in PREFILL}
    print(f"{moved / 1e6:.1f} MB verified, sent by {grown}")
    assert moved > 0
    assert all(nbytes > 0.4 * moved for nbytes in grown.values()), "each of two ranks sends its half"


@EVERY
def test_decode_ranks_know_their_interface_from_the_route_and_mooncake_its_protocol(site: Site) -> None:
    rows = interfaces(site)
    assert {
        host: (rows[host]["ranks"], rows[host]["source"]) for host in sorted(set(PLACE.values()) - set(PREFILL))
    } == {
        "n3": (["decode-0"], ["route"]),
        "n4": (["decode-1"], ["route"]),
    }
    assert {(row["state"], row["bits_per_s"]) for row in rows.values()} == {("up", 10 * 10**9)}
    told = {row["transport"].get("protocol") for row in site.fleet.kvctl("status")}
    assert told == ({"tcp"} if "mooncake" in site.fleet.plan.transport else {None})


@EVERY
def test_a_probe_names_the_interface_that_carried_its_bytes(site: Site) -> None:
    site.load.drain(PATIENCE_S)  # a room in transfer would share the interface
    rows = site.fleet.kvctl("peers", "probe")
    source = "engine" if "mooncake" in site.fleet.plan.transport else "counters"
    assert {(row["agent"], row["peer"]) for row in rows} == {(p, d) for p in RANKS[:2] for d in RANKS[2:]}
    for row in rows:
        assert (row["lane"], row["lane_source"], list(row["carried"])) == ("tcp", source, ["eth0"]), row
        assert row["moved_bytes"] <= row["carried"]["eth0"] < 1.5 * row["moved_bytes"], row


@EVERY
@pytest.mark.usefixtures("as_before")
def test_segments_that_a_network_loses_are_named_with_the_host(site: Site) -> None:
    site.network.lose("n1", "n3", 4)
    site.network.lose("n1", "n4", 4)
    found: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    with ThreadPoolExecutor(1) as pool:
        while "n1 tcp" not in found:
            assert time.monotonic() < deadline, f"no finding about n1 within {PATIENCE_S:g} s, only {found}"
            doctor = pool.submit(site.doctor, "KV_NIC_ERRORS")
            while not doctor.done():
                site.load.run(0.2)
            found = [row["subject"] for row in doctor.result()]
    assert "n2 tcp" not in found
