"""What the matrix covers."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from tests.matrix.matrix_rig.combinations import AXES, combinations, coverage, possible_pairs

pytestmark = pytest.mark.sample


def test_every_two_values_of_any_two_axes_meet(capsys: pytest.CaptureFixture[str]) -> None:
    covered = coverage(combinations())
    with capsys.disabled():
        print(f"\nmatrix: {len(combinations())} combinations cover {covered}")
    assert covered.pairs == covered.possible_pairs


def test_each_transport_has_its_half_and_every_path_grouped_and_not() -> None:
    chosen = combinations()
    by_transport = Counter(one.transport for one in chosen)
    assert min(by_transport.values()) >= len(chosen) * 2 // 5
    for transport, path, grouped in product(AXES["transport"], AXES["path"], AXES["grouped"]):
        assert sum((one.transport, one.path, one.grouped) == (transport, path, grouped) for one in chosen) >= 4


def test_only_what_no_layout_allows_never_meets() -> None:
    met = set(possible_pairs())
    every = {
        ((a, x), (b, y)) for i, a in enumerate(AXES) for b in list(AXES)[i + 1 :] for x, y in product(AXES[a], AXES[b])
    }
    axes = {(a, b) for (a, _), (b, _) in every - met}
    # Heads that do not divide, a room that several are to share where there is one, a last stage that waits.
    assert axes <= {
        ("model", "prefill_tp"),
        ("model", "decode_tp"),
        ("prefill_cp", "cp_mode"),
        ("prefill_pp", "early_send"),
    }
