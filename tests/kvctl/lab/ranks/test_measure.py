"""What a rank reads of its agent when a run is over, and floors of copies on a device, on the stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.measure import device_gb_per_s, peer_gb_per_s
from kvctl_agent.errors import PeerDisconnected
from kvctl_agent.observer.room_records import FoldedRoom, Part
from kvctl_agent.paths.peer_connection import MappedMemory
from tests.support.host_device import HostDevice, at


def test_stages_last_from_the_one_before_and_forgotten_rooms_spoil_no_report() -> None:
    def find(room: int) -> Any:
        record = FoldedRoom(1, room, 1, "prefill", 0, 100)
        for chunk in (0, 1):
            moments = {"ready": 100, "gate": 100 + room, "wire": 900}
            record.part(Part((0, chunk, (0, 4)), "decode-0", "bulk", 1, moments, None))
        return [record] if room != 2 else []

    assert measure.stages(find, [1, 2, 3]) == {"ready": [0, 0], "gate": [1, 3], "wire": [799, 797]}


class TestLayerGroups:
    def groups(self, *events: tuple[str, int | None, tuple[int, int] | None]) -> int:
        parts = [SimpleNamespace(stage="wire", peer=peer, chunk=chunk, layers=layers) for peer, chunk, layers in events]
        return measure.layer_groups([SimpleNamespace(events=parts)], layers=8)  # type: ignore[list-item]

    def test_they_are_those_of_one_chunk_to_one_reader(self) -> None:
        assert self.groups(("a", 0, (0, 4)), ("a", 0, (4, 8)), ("b", 0, (0, 4)), ("a", 1, (0, 4))) == 2

    def test_draft_layers_state_and_aux_rows_are_none(self) -> None:
        assert self.groups(("a", 0, (0, 8)), ("a", 0, (8, 9)), ("a", None, (0, 4)), ("a", 0, None)) == 1

    def test_nothing_is_known_of_a_room_without_parts(self) -> None:
        assert self.groups() == 0


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
