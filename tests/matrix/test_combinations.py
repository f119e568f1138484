"""What the matrix covers."""

from __future__ import annotations

from itertools import combinations as choose
from itertools import product

import pytest

from tests.matrix.matrix_rig.combinations import AXES, combinations, pairs_of, possible_pairs

pytestmark = pytest.mark.sample


def test_every_two_values_of_any_two_axes_meet() -> None:
    met = {pair for one in combinations() for pair in pairs_of(one)}
    assert met == set(possible_pairs())
    every = {((a, x), (b, y)) for a, b in choose(AXES, 2) for x, y in product(AXES[a], AXES[b])}
    # Heads that do not divide, a room that several are to share where there is one, a last stage that waits.
    assert {(a, b) for (a, _), (b, _) in every - met} <= {
        ("model", "prefill_tp"),
        ("model", "decode_tp"),
        ("prefill_cp", "cp_mode"),
        ("prefill_pp", "early_send"),
    }


def test_each_transport_has_every_path_grouped_and_not() -> None:
    met = {(one.transport, one.path, one.grouped) for one in combinations()}
    assert met == set(product(AXES["transport"], AXES["path"], AXES["grouped"]))
