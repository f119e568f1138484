from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.memory.addresses import PageSteps
from kvctl_agent.memory.page_runs import run_descriptors
from tests.support.gil import gave_up_the_gil

BYTES = PageSteps(1, 1, 1)


def test_the_callers_lists_are_left_alone() -> None:
    src, dst, zero = np.array([5, 4, 1]), np.array([1, 0, 3]), np.zeros(1, np.int64)
    run_descriptors(src, dst, BYTES, BYTES, 1, zero, zero)
    assert src.tolist() == [5, 4, 1]
    assert dst.tolist() == [1, 0, 3]


STEPS = st.builds(PageSteps, st.sampled_from([1, 4096, 12288]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 4096]))


@settings(deadline=None)
@given(
    st.dictionaries(st.integers(0, 60), st.integers(0, 60), max_size=50),
    st.randoms(use_true_random=False),
    st.tuples(STEPS, STEPS),
    st.sampled_from([np.int32, np.int64]),
    st.lists(st.tuples(st.integers(0, 1 << 46), st.integers(0, 1 << 46)), min_size=1, max_size=5),
    st.sampled_from([1, 4096]),
)
def test_the_runs_of_each_block_begin_at_its_addresses(
    pairs: dict[int, int],
    random: object,
    steps: tuple[PageSteps, PageSteps],
    kind: type[np.int32] | type[np.int64],
    blocks: list[tuple[int, int]],
    page_bytes: int,
) -> None:
    shuffled = list(pairs.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    src, dst = (np.array([pair[side] for pair in shuffled], kind) for side in (0, 1))
    local, remote = (np.array([block[side] for block in blocks], np.int64) for side in (0, 1))
    found = run_descriptors(src, dst, *steps, page_bytes, local, remote)
    offsets = zip(steps[0].offsets(src).tolist(), steps[1].offsets(dst).tolist(), strict=True)
    runs: list[tuple[int, int, int]] = []
    for one, other in sorted(offsets, key=lambda pair: pair[0]):
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (one, other):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + page_bytes)
        else:
            runs.append((one, other, page_bytes))
    wanted = [(here + one, there + other, size) for here, there in blocks for one, other, size in runs]
    assert {words.dtype for words in found} == {np.dtype(np.uint64)}
    assert list(zip(*(words.tolist() for words in found), strict=True)) == wanted


def test_descriptors_refuse_what_does_not_fit() -> None:
    two, three = np.arange(2), np.arange(3)
    with pytest.raises(ValueError, match="differ in number"):
        run_descriptors(two, three, BYTES, BYTES, 1, two, two)
    with pytest.raises(ValueError, match="differ in number"):
        run_descriptors(two, two, BYTES, BYTES, 1, two, three)
    with pytest.raises(ValueError, match="a page has no bytes"):
        run_descriptors(two, two, BYTES, BYTES, 0, two, two)
    with pytest.raises(ValueError, match="no transfer page"):
        run_descriptors(two, two, BYTES, PageSteps(1, 0, 1), 1, two, two)
    with pytest.raises(TypeError, match="pages must be int32 or int64"):
        run_descriptors(two.astype(np.int16), two, BYTES, BYTES, 1, two, two)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="addresses int64"):
        run_descriptors(two, two, BYTES, BYTES, 1, two.astype(np.int32), two)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="in one dimension"):
        run_descriptors(two, two, BYTES, BYTES, 1, np.zeros((1, 2), np.int64), two)


LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("src", "dst", "steps", "page_bytes", "local", "remote"),
    [
        ([LARGEST], [0], (2, 1, 1), 1, 0, 0),
        ([0], [LARGEST], (2, 1, 1), 1, 0, 0),
        ([-1], [0], (1, 3, LARGEST), 1, 0, 0),
        ([1, 2], [0, 1], (2**62, 3, 2**62), 2**62, 0, 0),
        ([1], [0], (1, 1, 1), 1, LARGEST, 0),
        ([0], [1], (1, 1, 1), 1, 0, LARGEST),
        ([0], [0], (1, 1, 1), LARGEST, 1, 0),
        ([0], [0], (1, 1, 1), LARGEST, 0, 1),
        ([0, 1, 2], [0, 1, 2], (2**62, 1, 1), 2**62, 0, 0),
        ([-LARGEST - 1, LARGEST], [0, 1], (1, 1, 1), 1, 1, 0),
    ],
)
def test_descriptors_outside_the_address_space_are_refused(
    src: list[int], dst: list[int], steps: tuple[int, int, int], page_bytes: int, local: int, remote: int
) -> None:
    step = PageSteps(*steps)
    with pytest.raises(ValueError, match="outside the address space"):
        run_descriptors(np.array(src), np.array(dst), step, step, page_bytes, np.array([local]), np.array([remote]))


def test_descriptors_keep_the_gil() -> None:
    """As many as in a room of 1,024 tokens, with pages in descending order."""
    pages, blocks = np.arange(0, 64 * 4096, 4096)[::-1].copy(), np.arange(64) << 30

    def make() -> None:
        for _ in range(200):
            run_descriptors(pages, pages, BYTES, BYTES, 4096, blocks, blocks)

    assert not gave_up_the_gil(make)
    assert gave_up_the_gil(lambda: time.sleep(0.5))
