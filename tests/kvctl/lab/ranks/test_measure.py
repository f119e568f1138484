"""What a rank reads of its agent when a run is over, and floors of copies on a device, on the stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.lab.ranks import measure
from kvctl.lab.ranks.measure import device_gb_per_s, peer_gb_per_s
from kvctl_agent.errors import PeerDisconnected, RequestRefused
from kvctl_agent.paths.peer_connection import MappedMemory
from tests.support.host_device import HostDevice, at


def test_a_room_that_its_agent_has_just_forgotten_spoils_no_report() -> None:
    """With many rooms the last ones still end, and push out others, while the report is made."""

    def layers(room: int) -> list[Any]:
        if room == 2:
            raise RequestRefused("unknown-room", "decode-3 knows no room 2, active or recent")
        return [{"stages": {"gather": {"p50_ns": room}, "wire": {"p50_ns": None}}}]

    assert measure.stages(layers, [1, 2, 3]) == {"gather": [1, 3]}


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
