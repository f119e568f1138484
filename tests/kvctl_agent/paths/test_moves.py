"""Every path moves exactly the planned bytes between two real transports, for any two layouts that fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.paths import bulk
from kvctl_agent.paths.bulk import AuxPath, BulkPath
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from tests.kvctl_agent.paths.conftest import POISON


def test_bulk_merges_neighbours_into_one_descriptor_for_each_layer_and_plane(ends: Any, geometry: Any) -> None:
    made = ends(geometry(prefill_tp=1, decode_tp=1))
    share, path = made.geometry.shares()[0], BulkPath()

    def descriptors(src: Any, dst: Any, layers: tuple[int, int] = (0, 3)) -> int:
        flight = made.fly(path, share, src, dst, layers=layers)
        assert flight.posts == 1
        count: int = flight.descriptors
        return count

    assert descriptors(range(10), range(20, 30)) == 6
    assert descriptors(range(10), range(20, 30), (1, 2)) == 2
    assert descriptors([9, 8, 7], [3, 2, 1]) == 6, "pages handed out downwards are neighbours too"
    assert descriptors([0, 1, 2, 3], [0, 1, 9, 10]) == 12
    assert descriptors([0, 2, 4], [5, 7, 9]) == 18


def test_bulk_refuses_what_only_differs_in_heads(ends: Any, geometry: Any) -> None:
    made = ends(geometry(prefill_tp=2, decode_tp=1))
    share = made.geometry.shares()[0]
    for wrong in (share, None):
        with pytest.raises(MemoryLayoutError, match="bulk needs the same heads on both sides"):
            BulkPath().start(made.connection(share), made.order(wrong, [1], [1]))


class TestSlice:
    def test_a_rank_that_owes_nothing_is_a_local_error(self, ends: Any, geometry: Any) -> None:
        made = ends(geometry())
        with pytest.raises(MemoryLayoutError, match="has no heads to send"):
            SlicePath().start(made.connection(made.geometry.shares()[0]), made.order(None, [1], [1]))


def _counted(call: Any, name: str, calls: list[str]) -> Any:
    """`call`, which adds `name` to `calls`."""

    def counted(*arguments: Any) -> Any:
        calls.append(name)
        return call(*arguments)

    return counted


class TestAux:
    def test_the_row_lands_in_its_slot_and_nowhere_else(self, ends: Any, geometry: Any, landed: Any) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        wanted = made.readers[0].aux[0].copy()
        wanted[3] = made.writers[0].aux[0][1]
        order = made.order(None, [1], [3], kind=PartKind.AUX)
        landed(AuxPath().start(made.connection(share), order), made.there)
        assert made.tags(1) == [b"tag"]
        assert np.array_equal(made.readers[0].aux[0], wanted)
        made.check()

    def test_a_small_row_is_sent_in_its_tag_and_nothing_is_written(
        self, ends: Any, geometry: Any, landed: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = ends(geometry())
        written: list[str] = []
        monkeypatch.setattr(made.here, "write", _counted(made.here.write, "write", written))
        tag = Tag(PartKind.AUX, 1, 2, 3, 0, PartKey(0, 0, 0, 0))
        order = replace_struct(made.order(None, [1], [3], kind=PartKind.AUX), tag=tag.pack())
        flight = AuxPath().start(made.connection(made.geometry.shares()[0]), order)
        assert flight.advance()
        row = made.writers[0].aux[0][1].tobytes()
        assert flight.row == row
        (arrived,) = made.tags(1)
        assert Tag.unpack(arrived) == tag._replace(row=row)
        assert not written
        assert (made.readers[0].aux[0] == POISON).all()

    @pytest.mark.parametrize("why", ["checksum", "large"])
    def test_a_row_with_a_checksum_and_a_large_row_are_written(
        self, ends: Any, geometry: Any, landed: Any, monkeypatch: pytest.MonkeyPatch, why: str
    ) -> None:
        made = ends(geometry())
        tag = Tag(PartKind.AUX, 1, 2, 3, 0, PartKey(0, 0, 0, 0), checksum=4 if why == "checksum" else None).pack()
        if why == "large":
            monkeypatch.setattr(bulk, "MAX_ROW_BYTES", made.writers[0].aux[0].shape[1] - 1)
        flight = AuxPath().start(
            made.connection(made.geometry.shares()[0]),
            replace_struct(made.order(None, [1], [3], kind=PartKind.AUX), tag=tag),
        )
        landed(flight, made.there)
        assert flight.row is None
        assert made.tags(1) == [tag]
        assert np.array_equal(made.readers[0].aux[0][3], made.writers[0].aux[0][1])

    @pytest.mark.parametrize(("row", "slot"), [(3, 8), (8, 3), (3, 9)])
    def test_the_two_sides_may_have_unequal_numbers_of_slots(self, row: int, slot: int) -> None:
        fewer, more = (PoolAddresses((), (base, 2 * base), (16, 48), slots) for base, slots in ((1000, 4), (5000, 9)))
        posted: list[Any] = []
        transport = SimpleNamespace(write=lambda peer, *write: posted.append(write) or SimpleNamespace(descriptors=2))
        connection: Any = SimpleNamespace(local=fewer, remote=more, transport=transport, peer="reader")
        pages = {"src_pages": np.array([row], np.int32), "dst_pages": np.array([slot], np.int32)}
        order: Any = SimpleNamespace(**pages, tag=b"tag")
        if (row, slot) != (3, 8):
            with pytest.raises(MemoryLayoutError, match=f"aux row {row} .* cannot go to row {slot} "):
                AuxPath().start(connection, order)
            return
        AuxPath().start(connection, order)
        ((here, there, sizes, _),) = posted
        assert here.tolist() == [1000 + 3 * 16, 2000 + 3 * 48]
        assert there.tolist() == [5000 + 8 * 16, 10000 + 8 * 48]
        assert sizes.tolist() == [16, 48]

    @pytest.mark.parametrize(("row", "slot"), [(-1, 3), (4, 3), (1, -1), (1, 4)])
    def test_a_row_outside_either_pool_says_what_to_do(self, ends: Any, geometry: Any, row: int, slot: int) -> None:
        made = ends(geometry())
        order = made.order(None, [row], [slot], kind=PartKind.AUX)
        with pytest.raises(MemoryLayoutError, match=r"pass an aux row to finish\(\)"):
            AuxPath().start(made.connection(made.geometry.shares()[0]), order)
