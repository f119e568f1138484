"""Split brain between hosts: a rank is cut off with writes under way and replaced on another host; the network heals.

What the first process still writes must not reach a page that was given to another room meanwhile.
"""

from __future__ import annotations

import time

import pytest

from tests.network.conftest import PLACE, SPARE, Site

NIXL = pytest.param("nixl", marks=pytest.mark.sample)
EVERY = pytest.mark.parametrize("site", [NIXL, "mooncake"], indirect=True, scope="module")
VICTIM = "prefill-1"


@EVERY
def test_the_writes_of_a_replaced_rank_reach_no_page_of_another_room(site: Site) -> None:
    """Every byte of every room is compared, and free pages are searched for stray writes, also after the healing."""
    fleet, load, network = site.fleet, site.load, site.network
    host = PLACE[VICTIM]
    former = next(row for row in fleet.kvctl("agents") if row["name"].startswith(VICTIM))
    site.disturb()
    # Its bytes wait in the sockets of its host when it is cut off: they are sent again after the healing.
    network.limit_rate("n3", 4)
    network.limit_rate("n4", 4)
    load.run(1.0)
    network.isolate(host)
    load.pause(VICTIM)
    site.until(lambda: bool(site.kept()), "pages that the silent writer may still write are kept")
    network.unlimit()

    fleet.place[VICTIM] = SPARE
    load.replace(VICTIM)
    site.until(lambda: fleet.ranks[VICTIM].serving, "the replacement serves")
    began_ns = time.monotonic_ns()
    site.until(lambda: site.served_since(began_ns), "rooms succeed with the replacement")
    kept = site.kept()
    assert kept, "a new process of the name proves nothing about the former one"
    (finding,) = [row for row in site.doctor("KV_QUARANTINE") if row["subject"] == next(iter(kept))]
    assert f"on {host}" in finding["cause"] + finding["remedy"], finding
    print(f"{former['name']}: {sum(kept.values()) >> 10} KiB kept: {finding['cause']}")

    rooms = load.accounting.done
    network.heal()
    load.resume_replaced(VICTIM)
    site.until(lambda: load.accounting.done >= rooms + 50, "fifty more rooms succeed, while late writes arrive")
    site.until(lambda: not site.kept(), "the former process has drained, and the quarantine ends")
    assert site.findings() == []
    usage = fleet.usage(60.0, sweep=True)
    assert {name: each["strays"] for name, each in usage.items() if each["strays"]} == {}
    load.end_replaced(VICTIM, kill=False)
    site.recover()
