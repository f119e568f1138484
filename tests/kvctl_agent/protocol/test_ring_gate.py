"""A writer's view of a reader's watermark: late and malformed news change nothing."""

from __future__ import annotations

import pytest

from kvctl_agent.protocol.ring import ALIGNMENT, Ring, RingGate


def test_before_any_news_only_round_0_is_open() -> None:
    gate = RingGate()
    assert gate.open(0, 1000)
    assert not gate.open(1, 1)


def test_news_open_what_they_have_passed() -> None:
    gate = RingGate()
    assert gate.hear([0, 512, 1], 5)
    assert gate.open(1, 512)
    assert not gate.open(1, 513)
    assert gate.heard_ns == 5


def test_an_older_sequence_changes_nothing() -> None:
    gate = RingGate()
    gate.hear([3, 0, 7], 0)
    assert not gate.hear([2, 512, 6], 1)
    assert gate.position == (3, 0)


def test_the_same_sequence_again_changes_nothing() -> None:
    gate = RingGate()
    gate.hear([3, 0, 7], 0)
    assert not gate.hear([3, 0, 7], 1)
    assert gate.heard_ns == 0


@pytest.mark.parametrize("watermark", [[], [1], [1, 2], [1, 2, 3, 4]])
def test_malformed_news_change_nothing(watermark: list[int]) -> None:
    gate = RingGate()
    assert not gate.hear(watermark, 1)
    assert gate.sequence == -1


def test_every_sequence_of_a_ring_moves_the_gate_forward() -> None:
    ring, gate = Ring(3 * ALIGNMENT), RingGate()
    live = [ring.allocate(ALIGNMENT) for _ in range(8)]
    for region in live:
        ring.free(region.serial)
        assert gate.hear([*ring.watermark, ring.sequence], 0)
