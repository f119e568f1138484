"""Floors of copies on a device, on the stand-in: that they copy, how they wait, and when there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.lab.ranks.measure import device_gb_per_s, peer_gb_per_s
from kvctl_agent.errors import PeerDisconnected
from kvctl_agent.paths.peer_connection import MappedMemory
from tests.support.host_device import HostDevice, at

KIB = 1 << 10


def lane(mapping: MappedMemory | None, ring_base: int) -> Any:
    return SimpleNamespace(mapping=mapping, ring_base=ring_base)


def test_a_copy_within_the_device_has_a_rate():
    assert 0.01 < device_gb_per_s(HostDevice(), 256 * KIB) < 10_000


def test_a_peer_s_ring_is_written_through_its_mapping():
    here, there = HostDevice(), HostDevice()
    ring = there.allocate(64 * KIB)
    there.fill(ring.addr, 64 * KIB, 1)
    mapped = MappedMemory(here.open(there.export([(ring.addr, ring.nbytes)])))
    rate = peer_gb_per_s(here, lane(mapped, ring.addr), 64 * KIB)
    assert rate is not None
    assert rate > 0
    assert (at(ring.addr, 64 * KIB) == 0xA5).all()  # what fresh memory of the stand-in is full of
    assert mapped.users == 0
    mapped.close()
    with pytest.raises(PeerDisconnected):
        peer_gb_per_s(here, lane(mapped, ring.addr), 64 * KIB)


def test_without_a_mapping_there_is_none():
    assert peer_gb_per_s(HostDevice(), None) is None
    assert peer_gb_per_s(HostDevice(), lane(None, 4096)) is None
