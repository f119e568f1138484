"""The cost model of `kvctl tune`, term by term, and what it recommends."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens
from kvctl.lab.ranks.resolve import make_plan
from kvctl.lab.tune.advise import Workload, advise
from kvctl.lab.tune.confirm import compared, remarks
from kvctl.lab.tune.costs import Copies, Costs, Lane, given_lane
from kvctl.lab.tune.model import Part, chain_us, cpu_us, exposed_us, parts_of, predict, ring_bytes
from kvctl.lab.tune.room import Room, room_of
from kvctl_agent.contract.connection_cost import ConnectionCost

MIB = 1 << 20
LANE = ConnectionCost(10.0, 20.0, ((512, 2.0), (4096, 3.0), (32768, 8.0), (262144, 30.0)))
COSTS = Costs(
    lane=Lane(LANE),
    gather=Copies(((256, 400.0), (1024, 200.0), (8192, 100.0))),
    scatter=Copies(((256, 500.0), (1024, 250.0), (8192, 120.0))),
    memcpy_gb_per_s=12.0,
    room_us=1000.0,
    rank_us=300.0,
    cores=2,
    origin="a test",
)
LOAD = Workload(concurrency=4, rate=None, mean_tokens=1024, layer_us=0.0, decode_groups=4, layers=32)


@cache
def room(prefill: Sizes, decode: Sizes, page_size: int = 16, tokens: int = 1024, order: str = "random") -> Room:
    load = (Load(4, Tokens((tokens,))),)
    return room_of(
        make_plan(PlanRequest((prefill,), decode, load, 4 << 30, seed=1, page_size=page_size, page_order=order))
    )


@pytest.fixture(scope="module")
def split() -> Room:
    return room(Sizes(tp=4), Sizes(dp=4))


@pytest.fixture(scope="module")
def same() -> Room:
    return room(Sizes(tp=2), Sizes(tp=2))


# ---- costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "us"), [(64, 2.0), (512, 2.0), (2304, 2.5), (32768, 8.0), (362144, 40.0)])
def test_a_descriptor_costs_what_was_measured_and_what_lies_between(nbytes: int, us: float) -> None:
    assert LANE.descriptor_us(nbytes) == pytest.approx(us)


def test_a_copy_costs_what_the_next_smaller_row_does() -> None:
    assert COSTS.gather.us(MIB, 1024) == COSTS.gather.us(MIB, 8191) == 200.0
    assert COSTS.gather.us(MIB, 16) == 400.0
    assert COSTS.gather.us(3 * MIB, 1 << 20) == 300.0


def test_a_lane_given_by_hand() -> None:
    lane = given_lane("gbps=40,us=1.2,device")
    assert (lane.cost.write_gb_per_s, lane.cost.us_per_write, lane.on_cpu) == (40.0, 1.2, False)
    assert lane.cost.descriptor_us(64) == pytest.approx(1.2)
    assert lane.cost.descriptor_us(4 << 20) == pytest.approx((4 << 20) / 40e3, rel=0.01)
    assert given_lane("us=1.2, gbps=40").on_cpu


@pytest.mark.parametrize("text", ["", "gbps=40", "gbps=40,us=x", "gbps=-1,us=2", "gbps=40,us=1,lanes=3", "40,1.2"])
def test_a_lane_that_is_not_written_so(text: str) -> None:
    with pytest.raises(ValueError, match="write gbps=40,us="):
        given_lane(text)


# ---- the room -----------------------------------------------------------------------------------------------------


def test_a_room_is_what_the_plan_says(split: Room) -> None:
    assert split.nbytes == 128 * MIB
    assert (len(split.writers), len(split.readers)) == (4, 1)
    assert split.paths == ("slice", "staged")
    one = split.owed[0]
    assert one.descriptors == {"slice": 65536, "staged": 1}
    # Two of eight heads of 128 bf16: the writer's pool has just these, so a page lies together; the reader's has more.
    assert (one.src_row, one.dst_row) == (16 * 512, 512)


def test_bulk_is_for_pools_that_hold_the_same_heads(same: Room) -> None:
    assert same.paths == ("bulk", "slice", "staged")
    assert same.owed[0].src_row == same.owed[0].dst_row == 16 * 4 * 256


def test_neighbouring_pages_merge(same: Room) -> None:
    merged = room(Sizes(tp=2), Sizes(tp=2), order="contiguous")
    assert merged.owed[0].descriptors["bulk"] * 64 == same.owed[0].descriptors["bulk"]


def test_large_pages_are_filled_up() -> None:
    assert room(Sizes(), Sizes(), page_size=128, tokens=130).padded_bytes == pytest.approx(
        126 / 256 * 32 * MIB, rel=0.01
    )


# ---- the model ----------------------------------------------------------------------------------------------------


def test_parts_in_a_row_overlap() -> None:
    one = Part(10.0, 20.0, 5.0)
    assert chain_us(one, 1) == 35.0
    assert chain_us(one, 3) == 35.0 + 2 * 20.0


def test_chunks_make_parts(split: Room) -> None:
    assert [parts_of(split, chunk) for chunk in (256, 1000, 1024, 8192)] == [4, 2, 1, 1]


def test_work_is_the_sum_of_all_ranks_work(split: Room) -> None:
    nbytes = 32 * MIB
    each = 32 * 100.0 + LANE.write_us(1, nbytes) + 32 * 500.0
    assert cpu_us(split, "staged", 1, COSTS) == pytest.approx(5 * 300.0 + 4 * each)
    device = replace(COSTS, lane=Lane(LANE, on_cpu=False))
    assert cpu_us(split, "staged", 1, device) == pytest.approx(5 * 300.0 + 4 * (32 * 600.0 + LANE.us_per_write))


def test_what_limits(split: Room) -> None:
    alone = predict(split, "staged", 8192, COSTS, 1, None, 1.0)
    busy = predict(split, "staged", 8192, COSTS, 64, None, 1.0)
    device = replace(COSTS, lane=given_lane("gbps=1,us=1,device"), cores=64)
    wire = predict(split, "staged", 8192, device, 64, None, 1.0)
    assert (alone.bound, busy.bound, wire.bound) == ("latency", "cores", "lane")
    assert alone.p50_us == pytest.approx(alone.alone_us)
    assert busy.p50_us == pytest.approx(64e6 / busy.rooms_per_s)
    assert wire.gb_per_s == pytest.approx(4.0, rel=0.05)  # four writers of 1 GB/s each


def test_rooms_that_come_at_a_rate_wait_the_longer_the_fuller_the_machine_is(split: Room) -> None:
    most = predict(split, "staged", 8192, COSTS, 64, None, 1.0).rooms_per_s
    low, high, over = (predict(split, "staged", 8192, COSTS, 64, most * part, 1.0) for part in (0.1, 0.9, 1.5))
    assert low.rooms_per_s == pytest.approx(most * 0.1)
    assert low.alone_us < low.p50_us < high.p50_us
    assert over.rooms_per_s == pytest.approx(most)


@given(
    tokens=st.sampled_from([16, 100, 1024, 4096]),
    concurrency=st.integers(1, 256),
    chunk=st.sampled_from([256, 1024, 8192]),
    share=st.floats(0.01, 1.0),
)
def test_predictions_keep_to_what_must_hold(tokens: int, concurrency: int, chunk: int, share: float) -> None:
    one = room(Sizes(tp=2), Sizes(dp=2), tokens=tokens)
    for path in one.paths:
        said = predict(one, path, chunk, COSTS, concurrency, None, share)
        assert 0 < said.alone_us <= said.p50_us * 1.000001
        assert said.p50_us <= said.p99_us * 1.000001
        assert said.rooms_per_s * said.p50_us <= concurrency * 1e6 * 1.000001  # Little
        assert said.rooms_per_s * said.cpu_us <= COSTS.cores * 1e6 * 1.000001


def test_the_ring_holds_what_is_in_flight_and_one_part_more(split: Room) -> None:
    assert ring_bytes(split, "slice", 4, 4, 8192) == 0
    assert ring_bytes(split, "staged", 4, 4, 8192) == 2 * 128 * MIB
    assert ring_bytes(split, "staged", 8, 4, 256) == 2 * 128 * MIB + 32 * MIB


def test_what_a_forward_does_not_hide() -> None:
    assert exposed_us(100.0, 50.0, 5, 0.0) == pytest.approx(10.0)  # the last group's
    assert exposed_us(50.0, 100.0, 5, 0.0) == pytest.approx(60.0)  # after the first group's compute
    assert exposed_us(100.0, 50.0, 5, 1.0) == pytest.approx(14.0)


# ---- advice -------------------------------------------------------------------------------------------------------


def test_staging_where_heads_are_split(split: Room) -> None:
    best, other = advise([("", split)], COSTS, LOAD)
    assert (best.path, best.recommended, best.ring_mb) == ("staged", True, 256)
    assert (other.path, other.recommended) == ("slice", False)
    assert "times fewer rooms a second" in other.why
    assert best.settings() == {"path": "staged", "chunk_tokens": 8192, "staging_ring_mb": 256}


def test_bulk_where_descriptors_cost_nothing(same: Room) -> None:
    cheap = replace(COSTS, lane=given_lane("gbps=10,us=0.01"))
    assert advise([("", same)], cheap, LOAD)[0].path == "bulk"


def test_another_page_size_must_be_well_worth_it(same: Room) -> None:
    larger = room(Sizes(tp=2), Sizes(tp=2), page_size=32)
    flat = replace(COSTS, lane=given_lane("gbps=10,us=0.001"))
    assert advise([("", same), ("", larger)], flat, LOAD)[0].page_size == 16
    steep = replace(COSTS, lane=given_lane("gbps=10,us=100"), gather=Copies(((1, 1e4),)), scatter=Copies(((1, 1e4),)))
    assert advise([("", same), ("", larger)], steep, LOAD)[0].page_size == 32


def test_groups_where_compute_can_hide_the_transfer(split: Room) -> None:
    quiet = advise([("", split)], COSTS, LOAD)[0]
    assert (quiet.group_size, quiet.hidden_ratio) == (0, None)
    busy = advise([("", split)], COSTS, replace(LOAD, layer_us=3000.0))[0]
    assert 1 < busy.group_size < 32
    assert busy.hidden_ratio is not None
    assert busy.hidden_ratio > 0.5
    assert busy.settings()["pipeline_group_size"] == busy.group_size


# ---- confirmed ----------------------------------------------------------------------------------------------------


def row(path: str, rooms_per_s: float, p50_ms: float) -> dict[str, Any]:
    return {"path": path, "rooms_per_s": rooms_per_s, "latency_ms": {"p50": p50_ms}}


def test_how_far_off(split: Room) -> None:
    said = predict(split, "staged", 8192, COSTS, 1, None, 1.0)
    found = compared(row("staged", said.rooms_per_s / 2, said.p50_us / 1e3), said)
    assert found["rooms_off_ratio"] == pytest.approx(1.0)
    assert found["p50_off_ratio"] == pytest.approx(0.0)
    (line, verdict) = remarks([found, compared(row("slice", 1e9, 1.0), replace(said, rooms_per_s=1.0))])[::2]
    assert line.startswith("staged: the model says 100% more rooms")
    assert verdict == "the model prefers staged, the bench slice"
