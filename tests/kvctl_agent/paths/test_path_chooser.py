"""The path of a part: configured paths, impossible paths, and the cheapest path for given costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape, StateShape, segments
from kvctl_agent.memory.allocations import HugePageMemory
from kvctl_agent.paths.calibration import measure_copies
from kvctl_agent.paths.connection_model import ConnectionModel, CopyCost, DirectCost
from kvctl_agent.paths.contiguous_runs import contiguous_runs
from kvctl_agent.paths.path_chooser import PathChooser
from kvctl_agent.transport.cost_probe import ConnectionCost

SHAPE = ModelShape(32, 8, 128, 128, 2, states=(StateShape("conv", (0, 1), 4, 8, 256),))
KV, CONV = segments(SHAPE, 16)
SAME = TransferSlice(0, 0, 0, 0, 0, 2, 0, 32, 2, 2, KV.page_head_bytes)  # both ends hold exactly these heads
CUT = TransferSlice(0, 0, 0, 0, 2, 2, 0, 32, 2, 8, KV.page_head_bytes)  # the reader holds more
# State is small and scattered, and gets no ring region.
STATE = TransferSlice(0, 0, 1, 0, 0, 2, 0, 2, 2, 2, CONV.page_head_bytes)
CUT_STATE = TransferSlice(0, 0, 1, 0, 2, 2, 0, 2, 2, 8, CONV.page_head_bytes)
RUN = np.arange(64, dtype=np.int32)
SCATTERED = (RUN * 7) % 1021
RING = 1 << 30
NO_RING = [("off", RING), ("auto", 0), ("on", 0), ("off", 0)]

FREE_DESCRIPTORS = ConnectionCost(10.0, 1.0, ((512, 0.0), (1 << 18, 1.0)))
DEAR_DESCRIPTORS = ConnectionCost(10.0, 10.0, ((512, 50.0), (1 << 18, 80.0)))
FREE_COPIES = CopyCost((256, 32768), (1.0, 1.0), (1.0, 1.0))
DEAR_COPIES = CopyCost((256, 32768), (1e6, 1e6), (1e6, 1e6))


def chooser(
    path: str = "auto",
    staging: str = "auto",
    connection: ConnectionCost | None = None,
    copy: CopyCost | None = None,
    direct: DirectCost | None = None,
) -> PathChooser:
    made = PathChooser(SHAPE, 16, path, staging)
    if connection is not None and copy is not None:
        made.model = ConnectionModel(connection, copy, direct)
    return made


DEAR = {"descriptors": (DEAR_DESCRIPTORS, FREE_COPIES), "copies": (FREE_DESCRIPTORS, DEAR_COPIES), "": (None, None)}
CHEAPEST, CHEAP, DEAREST = DirectCost(1.0, 1.0), DirectCost(10.0, 1.0), DirectCost(1e9, 1e6)


@pytest.mark.parametrize(
    ("path", "staging", "ring", "dear", "direct", "same", "cut"),
    [
        # A fixed path is taken whatever it costs, bulk where it is possible, and direct where it is not, too.
        ("slice", "auto", RING, "descriptors", CHEAPEST, "slice", "slice"),
        ("staged", "auto", RING, "copies", CHEAPEST, "staged", "staged"),
        ("bulk", "auto", RING, "", CHEAPEST, "bulk", "slice"),
        ("direct", "auto", RING, "descriptors", None, "direct", "direct"),
        # Without a ring, or with staging off, the plain paths and direct remain.
        *(("auto", staging, ring, "descriptors", None, "bulk", "slice") for staging, ring in NO_RING),
        *(("auto", staging, ring, "descriptors", CHEAPEST, "direct", "direct") for staging, ring in NO_RING),
        *(("auto", staging, ring, "descriptors", DEAREST, "bulk", "slice") for staging, ring in NO_RING),
        ("auto", "on", RING, "copies", CHEAPEST, "staged", "staged"),
        ("auto", "auto", RING, "descriptors", None, "staged", "staged"),
        ("auto", "auto", RING, "copies", None, "bulk", "slice"),
        ("auto", "auto", RING, "descriptors", CHEAP, "direct", "direct"),
        ("auto", "auto", RING, "descriptors", DirectCost(10.0, 1e6), "staged", "staged"),
    ],
)
def test_a_part_takes_the_configured_or_the_cheapest_path(
    path: str, staging: str, ring: int, dear: str, direct: DirectCost | None, same: str, cut: str
) -> None:
    made = chooser("staged", staging, *DEAR[dear], direct)
    made.path = path  # it may be changed while running
    mapped = direct is not None
    assert [made.choose(ring, share, 32, SCATTERED, mapped) for share in (SAME, CUT)] == [same, cut]


def test_before_anything_was_measured_scattered_heads_are_staged_unless_memory_is_mapped() -> None:
    assert chooser().choose(RING, CUT, 32, SCATTERED) == "staged"
    assert chooser().choose(RING, CUT, 32, SCATTERED, True) == "direct"
    assert chooser("auto", "auto", *DEAR["descriptors"]).choose(RING, CUT, 32, SCATTERED, True) == "direct"
    assert chooser("auto", "auto", *DEAR["descriptors"], CHEAP).choose(RING, CUT, 32, SCATTERED, False) == "staged"


@pytest.mark.parametrize("staging", ["on", "auto", "off"])
@pytest.mark.parametrize("shares", [(SAME, CUT), (STATE, CUT_STATE)], ids=["kv", "state"])
@pytest.mark.parametrize(
    ("path", "mapped", "same", "cut"),
    [
        *((path, False, "bulk", "slice") for path in ("auto", "staged", "bulk")),
        *((path, True, "bulk", "slice") for path in ("staged", "bulk")),
        *(("slice", mapped, "slice", "slice") for mapped in (False, True)),
        *(("direct", mapped, "direct", "direct") for mapped in (False, True)),
        ("auto", True, "direct", "direct"),
    ],
)
def test_state_and_parts_that_can_have_no_region_go_straight_to_their_pages(
    path: str, mapped: bool, same: str, cut: str, shares: tuple[TransferSlice, ...], staging: str
) -> None:
    made = chooser(path, staging, *DEAR["descriptors"])
    assert [made.without_ring(share, mapped) for share in shares] == [same, cut]


class TestAuto:
    def test_the_readers_page_runs_decide_between_bulk_and_staged(self) -> None:
        made = chooser(connection=DEAR_DESCRIPTORS, copy=CopyCost((256,), (500.0,), (500.0,)))
        assert made.choose(RING, SAME, 8, RUN) == "bulk"
        assert made.choose(RING, SAME, 8, SCATTERED) == "staged"

    def test_what_is_impossible_has_no_cost(self) -> None:
        made = chooser(connection=DEAR_DESCRIPTORS, copy=FREE_COPIES)
        assert "bulk" not in made.costs(CUT, 4, RUN)
        assert {"bulk", "staged"} <= set(made.costs(SAME, 4, RUN))

    def test_the_order_in_which_pages_were_handed_out_does_not_matter(self) -> None:
        made = chooser(connection=DEAR_DESCRIPTORS, copy=FREE_COPIES)
        assert made.costs(SAME, 4, RUN[::-1])["bulk"] == made.costs(SAME, 4, RUN)["bulk"]
        assert made.costs(SAME, 4, SCATTERED)["bulk"] > made.costs(SAME, 4, RUN)["bulk"]

    def test_costs_grow_with_layers_and_pages(self) -> None:
        made = chooser(connection=DEAR_DESCRIPTORS, copy=FREE_COPIES)
        for share, path in ((SAME, "bulk"), (SAME, "staged"), (CUT, "slice"), (CUT, "staged")):
            small, wide, deep = (
                made.costs(share, layers, pages)[path]
                for layers, pages in ((4, SCATTERED[:8]), (4, SCATTERED), (32, SCATTERED[:8]))
            )
            assert small < wide
            assert small < deep


class TestDirect:
    """Parts for a peer whose memory is mapped."""

    def made(
        self, path: str = "auto", staging: str = "auto", cost: DirectCost | None = None, **costs: Any
    ) -> PathChooser:
        return chooser(path, staging, **({"connection": DEAR_DESCRIPTORS, "copy": FREE_COPIES, "direct": cost} | costs))

    def test_its_cost_is_that_of_a_part_and_of_its_bytes(self) -> None:
        made = self.made(cost=DirectCost(10.0, 4.0))
        mib = SAME.payload_bytes(64, 4) / (1 << 20)
        assert made.costs(SAME, 4, SCATTERED, True)["direct"] == pytest.approx(10 + 4 * mib)

    @pytest.mark.parametrize("us_per_part", [10.0, 1e4])
    def test_small_parts_go_direct_even_if_its_kernels_began_late_when_they_were_measured(
        self, us_per_part: float
    ) -> None:
        made = self.made(cost=DirectCost(us_per_part, 4.0))
        alone = chooser(connection=DEAR_DESCRIPTORS, copy=FREE_COPIES).costs(CUT, 4, RUN[:1])
        costs = made.costs(CUT, 4, RUN[:1], True)
        assert costs["staged"] == pytest.approx(alone["staged"] + 2 * us_per_part)
        assert costs["direct"] < costs["staged"]


class TestGeometries:
    """Costs depend on the planes of a page, not only on the bytes of a token of K and V."""

    def made(self, shape: ModelShape) -> tuple[PathChooser, TransferSlice]:
        made = PathChooser(shape, 16, "auto", "auto")
        made.model = ConnectionModel(DEAR_DESCRIPTORS, CopyCost((256, 4096), (1000.0, 1.0), (1000.0, 1.0)))
        bytes_ = segments(shape, 16)[0].page_head_bytes
        return made, TransferSlice(0, 0, 0, 0, 0, 1, 0, 32, 1, 1, bytes_)

    def test_latents_are_one_plane(self) -> None:
        made, share = self.made(ModelShape(32, 1, 576, 0, 2, kind="mla"))
        plain, alike = self.made(ModelShape(32, 1, 288, 288, 2))
        assert share.payload_bytes(64, 4) == alike.payload_bytes(64, 4)
        assert made.costs(share, 4, SCATTERED)["bulk"] == DEAR_DESCRIPTORS.write_us(4 * 64, share.payload_bytes(64, 4))
        assert made.costs(share, 4, SCATTERED)["bulk"] < plain.costs(alike, 4, SCATTERED)["bulk"]

    def test_small_rows_of_scales_cost_what_small_rows_cost(self) -> None:
        made, share = self.made(ModelShape(32, 8, 128, 128, 2))
        scaled, with_scales = self.made(ModelShape(32, 8, 128, 128, 2, k_scale_bytes=64, v_scale_bytes=64))
        more = scaled.costs(with_scales, 4, SCATTERED)["staged"] - made.costs(share, 4, SCATTERED)["staged"]
        tiny = 2 * 4 * 64 * 64 / (1 << 20)  # MiB of scales, gathered and scattered at the rate of tiny rows
        assert more > 2 * tiny * 1000

    def test_slice_has_a_descriptor_for_each_row_of_each_plane(self) -> None:
        made, share = self.made(ModelShape(32, 8, 128, 64, 2, k_scale_bytes=4))
        cut = replace(share, dst_pool_heads=2)
        assert made.costs(cut, 4, RUN)["slice"] == DEAR_DESCRIPTORS.write_us(4 * 64 * 33, cut.payload_bytes(64, 4))


class TestCopyCost:
    def test_the_rate_of_the_nearest_smaller_row_applies(self) -> None:
        cost = CopyCost((256, 1024), (400.0, 100.0), (40.0, 10.0))
        assert [cost.gather_us(1 << 20, row) for row in (1, 256, 1023, 1024, 1 << 20)] == [400, 400, 400, 100, 100]
        assert cost.gather_us(1 << 19, 256) == 200
        assert cost.scatter_us(1 << 20, 512) == 40

    def test_measured_on_this_machine_it_is_a_rate_of_memory(self) -> None:
        """Rates lie within a factor of 1,000 of memory's, and large rows do not cost more than tiny ones."""
        with HugePageMemory(16 << 20) as memory:
            cost = measure_copies(memory.array)
        assert list(cost.row_bytes) == sorted(cost.row_bytes)
        for rates in (cost.gather_us_per_mib, cost.scatter_us_per_mib):
            assert len(rates) == len(cost.row_bytes)
            for us in rates:
                assert 1 < us < 100_000
            assert rates[-1] < 3 * rates[0]


class TestRuns:
    """Pools whose pages are not contiguous, or have another order inside a page."""

    WHOLE = contiguous_runs(KV.planes, SAME)
    ROWS = tuple(plane._replace(rows=1, per_page=16) for plane in WHOLE)

    def test_path_bulk_needs_pages_that_are_one_run_on_both_sides(self) -> None:
        assert chooser("bulk").choose(RING, SAME, 32, RUN, runs=self.WHOLE) == "bulk"
        assert chooser("bulk").choose(RING, SAME, 32, RUN, runs=self.ROWS) == "slice"
        assert chooser().without_ring(SAME, runs=self.ROWS) == "slice"
        made = chooser(connection=FREE_DESCRIPTORS, copy=DEAR_COPIES)
        assert made.choose(RING, SAME, 32, RUN, runs=self.ROWS) == "slice"

    def test_the_cost_counts_the_descriptors_of_both_sides(self) -> None:
        made = chooser(connection=DEAR_DESCRIPTORS, copy=FREE_COPIES)
        nbytes = SAME.payload_bytes(len(RUN), 4)
        apart = tuple(plane._replace(adjacent=False) for plane in self.WHOLE)
        for runs, path, descriptors in (
            (self.WHOLE, "bulk", 4 * 2),
            (apart, "bulk", 4 * 2 * len(RUN)),
            (self.ROWS, "slice", 4 * 2 * len(RUN) * 16),
        ):
            assert made.costs(SAME, 4, RUN, runs=runs)[path] == DEAR_DESCRIPTORS.write_us(descriptors, nbytes)
        assert made.costs(SAME, 4, RUN) == made.costs(SAME, 4, RUN, runs=self.WHOLE)

    def test_gathers_and_scatters_cost_what_runs_of_their_side_cost(self) -> None:
        by_row = CopyCost((256, 8192), (100.0, 1.0), (200.0, 1.0))
        made = chooser(connection=FREE_DESCRIPTORS, copy=by_row)
        staged = [
            made.costs(SAME, 4, RUN, runs=runs)["staged"]
            for runs in (
                self.WHOLE,
                tuple(plane._replace(gather_bytes=256) for plane in self.WHOLE),
                tuple(plane._replace(scatter_bytes=256) for plane in self.WHOLE),
            )
        ]
        assert staged == sorted(set(staged))
