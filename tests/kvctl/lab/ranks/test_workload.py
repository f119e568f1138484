"""Which rooms a bench runs: the arithmetic of batches, windows and pools."""

from __future__ import annotations

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.ranks import workload
from kvctl.lab.ranks.request import Tokens, draw_arrivals

small = st.integers(1, 40)


@given(low=st.integers(1, 500), more=st.integers(0, 500), seed=st.integers(0, 9))
def test_drawn_lengths_stay_in_their_range_and_follow_the_seed(low: int, more: int, seed: int):
    tokens = Tokens(low=low, high=low + more)
    drawn = tokens.draw(50, random.Random(seed))
    assert all(low <= length <= low + more for length in drawn)
    assert drawn == tokens.draw(50, random.Random(seed))
    assert low <= tokens.mean <= low + more == tokens.longest


def test_arrivals_come_at_the_rate_and_follow_the_seed():
    arrivals = draw_arrivals(200.0, 4000, seed=3)
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals) == draw_arrivals(200.0, 4000, seed=3)
    assert 4.5 < arrivals[-1] / len(arrivals) < 5.5
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert 0.6 < sum(gap < 5.0 * math.log(2) * 2 for gap in gaps) / len(gaps) < 0.9  # three quarters of them


@given(tokens=st.integers(1, 5000), page_size=st.sampled_from([1, 16, 64]), hit=st.floats(0, 0.999))
def test_a_cached_prefix_is_whole_pages_and_leaves_something_to_move(tokens: int, page_size: int, hit: float):
    prefix = workload.prefix_tokens(tokens, page_size, hit)
    assert prefix % page_size == 0
    assert 0 <= prefix < tokens
    assert prefix <= hit * (tokens + page_size)


@given(in_flight=small, dp=small)
def test_windows_add_up_and_differ_by_one_at_most(in_flight: int, dp: int):
    windows = workload.windows(in_flight, dp)
    assert len(windows) == dp
    assert sum(windows) == in_flight
    assert max(windows) - min(windows) <= 1


@given(in_flight=small, dp=small, rooms=st.integers(1, 100))
def test_every_room_goes_to_a_group_that_has_a_window(in_flight: int, dp: int, rooms: int):
    active = min(in_flight, dp)
    windows = workload.windows(in_flight, dp)
    groups = [workload.decode_group(position, active) for position in range(rooms)]
    assert all(windows[group] > 0 for group in groups)
    counts = [groups.count(group) for group in range(active)]
    assert max(counts) - min(counts) <= 1


@given(
    concurrency=st.integers(1, 300),
    rooms=st.integers(1, 500),
    room_bytes=st.integers(1, 1 << 32),
    most=st.integers(1, 600),
    dp=st.integers(1, 8),
)
def test_lots_cover_all_rooms_and_fit_in_memory(concurrency: int, rooms: int, room_bytes: int, most: int, dp: int):
    in_flight, batch_rooms = workload.fit_batch(concurrency, rooms, room_bytes, most, dp)
    batches = workload.cut(rooms, batch_rooms)
    assert [index for first, end in batches for index in range(first, end)] == list(range(rooms))
    assert all(0 < end - first <= min(most, rooms) for first, end in batches)
    assert in_flight == min(concurrency, most, rooms)


@given(pages=st.lists(st.integers(1, 9), min_size=1, max_size=40), size=st.integers(1, 12), groups=st.integers(1, 4))
def test_pools_hold_the_largest_lot_of_each_group(pages: list[int], size: int, groups: int):
    batches = workload.cut(len(pages), size)
    group_of = [(index % size) % groups for index in range(len(pages))]
    held = workload.most_held(pages, batches, group_of, groups)
    for group in range(groups):
        needs = [sum(pages[first + group : end : groups]) for first, end in batches]
        assert held[group] == max(needs) + 1  # page 0 is never used


def test_rooms_of_another_instance_take_no_pages():
    assert workload.most_held([5, 7, 9], [(0, 3)], [0, -1, 0], 1) == [15]


@given(groups=st.integers(1, 4), instances=st.integers(1, 4), dp=st.integers(1, 4))
def test_every_prefill_instance_s_dp_groups_meet_every_decode_group(groups: int, instances: int, dp: int):
    met = {
        (workload.prefill_instance(at, groups, instances, dp), at % groups, workload.decode_group(at, dp))
        for at in range(groups * instances * dp * max(instances, dp))
    }
    assert {(instance, group) for instance, group, _ in met} == {
        (instance, group) for instance in range(instances) for group in range(groups)
    }
    assert {(instance, group) for instance, _, group in met} == {
        (instance, group) for instance in range(instances) for group in range(dp)
    }
