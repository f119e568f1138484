"""Descriptors of a part: refused layers, and numbers that follow the part and not the pools."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.memory.addresses import PoolAddresses, SegmentAddresses
from kvctl_agent.paths.bulk import BulkPath
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath


class Recorder:
    """Replaces a transport and records the source, destination and size of every descriptor."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []

    def write(self, peer: str, here: Any, there: Any, sizes: Any, tag: bytes) -> Recorder:
        self.copies += zip(here.tolist(), there.tolist(), sizes.tolist(), strict=True)
        return self

    descriptors = 0


@pytest.mark.parametrize("engine", ["loopback"])
class TestRefusals:
    @pytest.mark.parametrize("path", [BulkPath, SlicePath])
    @pytest.mark.parametrize("layers", [(0, 1), (0, 2), (1, 3), (2, 3), (1, 1)])
    def test_layers_that_one_side_does_not_have(
        self, ends: Any, geometry: Any, path: Any, layers: tuple[int, int]
    ) -> None:
        made = ends(geometry(prefill=ParallelConfig(pp=3), decode=ParallelConfig()))
        share = made.geometry.shares()[1]
        assert (share.layer_lo, share.layer_hi) == (1, 2)
        with pytest.raises(MemoryLayoutError, match=r"kv: layers .* are not all on a rank that has 1$"):
            path().start(made.connection(share), made.order(share, [1], [1], layers))


@pytest.mark.parametrize("engine", ["loopback"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_descriptors_follow_the_pages_of_a_part_and_not_those_of_the_pools(
    ends: Any, geometry: Any, page_size: int
) -> None:
    """The peer of this pool states a million million pages of it; what a part costs must not depend on them."""
    made = ends(geometry(page_size=page_size, prefill=ParallelConfig(tp=2), decode=ParallelConfig()))
    share = made.geometry.shares()[0]
    theirs = made.readers[0].addresses()
    huge = SegmentAddresses(theirs.segments[0].shard, 1 << 40, theirs.segments[0].bases)
    recorder = Recorder()
    pool = PoolAddresses((huge,), theirs.aux_bases, theirs.aux_row_bytes, theirs.aux_slots)
    connection = PeerConnection("reader", recorder, made.writers[0], pool, 0)  # type: ignore[arg-type]
    SlicePath().start(connection, made.order(share, [1, 2], [3, 5]))
    assert len(recorder.copies) == 2 * page_size * share.num_layers * 2
