"""Fleets on hosts of their own over IPv4 and IPv6, and where only one of the two families leads from host to host."""

from __future__ import annotations

import itertools

import pytest

from tests.network.conftest import PLACE, Site

EVERY = pytest.mark.parametrize(
    "site", ["nixl", "nixl ipv6", "mooncake", "mooncake ipv6"], indirect=True, scope="module"
)


@EVERY
def test_rooms_cross_hosts_with_default_settings(site: Site) -> None:
    """The agents find out by which address others reach them, and do not take neighbours for processes of one host."""
    print(f"{site.rate(2.0):.1f} MB/s")
    peers = site.fleet.kvctl("peers")
    assert {(row["agent"], row["peer"]): (row["peer_host"], row["same_host"]) for row in peers} == {
        (one, other): (PLACE[other], False) for one, other in itertools.permutations(PLACE, 2) if one[:3] != other[:3]
    }


@EVERY
def test_a_broken_second_family_does_not_matter(site: Site) -> None:
    broken = "ip" if site.fleet.ipv6 else "ip6"
    for source, target in itertools.permutations(PLACE.values(), 2):
        site.network.drop_family(source, target, broken)
    assert site.rate(2.0) > 0
    assert site.findings() == []
    site.network.heal()
