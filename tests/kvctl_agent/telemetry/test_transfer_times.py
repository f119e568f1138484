"""Transfer times: what is observed of rooms that overlap, and what the fit makes of them."""

from __future__ import annotations

import random

import pytest

from kvctl_agent.telemetry.transfer_times import TransferFit, Transferred, TransferTimes, fit_transfers, remaining_ns

MS = 1_000_000
FIXED, PER_TOKEN = 2 * MS, 10_000


def took(tokens: int) -> int:
    return FIXED + tokens * PER_TOKEN


def alone(*tokens: int) -> list[Transferred]:
    return [Transferred(each, took(each), took(each), at, "bulk") for at, each in enumerate(tokens)]


def test_a_line_is_found_by_relative_errors() -> None:
    fit = fit_transfers(alone(16, 16_000, 300, 40, 7_000))
    assert fit.fixed_ns == pytest.approx(FIXED)
    assert fit.ns_per_token == pytest.approx(PER_TOKEN)
    assert fit.alone_ns(1000) == pytest.approx(took(1000))
    assert (fit.rooms, fit.ended_ns, fit.path) == (5, 4, "bulk")
    assert fit.error_ratio == pytest.approx(0, abs=1e-6)


def test_noise_and_stalls_hardly_move_it() -> None:
    source = random.Random(5)
    rooms = [
        each._replace(took_ns=late, share_ns=late)
        for each in alone(*(source.randint(16, 16_000) for _ in range(64)))
        for late in [round(each.took_ns * (source.uniform(0.9, 1.1) if source.random() < 0.85 else 5))]
    ]
    fit = fit_transfers(rooms)
    assert 0.02 < fit.error_ratio < 0.15
    for tokens in (16, 500, 16_000):
        assert fit.alone_ns(tokens) == pytest.approx(took(tokens), rel=0.2)


def test_recent_rooms_weigh_more() -> None:
    slow = [
        each._replace(took_ns=3 * each.took_ns, share_ns=3 * each.took_ns) for each in alone(*range(100, 3000, 100))
    ]
    fit = fit_transfers([*alone(*range(100, 3000, 100)), *slow, *slow])
    assert fit.alone_ns(1000) == pytest.approx(3 * took(1000), rel=0.1)


def test_rooms_of_one_size_have_a_rate_and_no_fixed_time() -> None:
    fit = fit_transfers(alone(*[512] * 6))
    assert (fit.fixed_ns, fit.ns_per_token) == (0, pytest.approx(took(512) / 512))


def test_times_that_fall_with_the_size_are_all_fixed() -> None:
    fit = fit_transfers([each._replace(tokens=5000 - each.tokens) for each in alone(100, 2000, 4900)])
    assert fit.ns_per_token == 0
    assert fit.fixed_ns > 0


@pytest.mark.parametrize("sharing", [1.0, 0.0])
def test_whether_rooms_slow_each_other_is_learnt(sharing: float) -> None:
    rooms = []
    for number, tokens in enumerate(range(100, 6000, 300)):
        others = 1 + number % 4  # rooms in transfer during the whole of this one
        late = took(tokens) * (others if sharing else 1)
        rooms.append(Transferred(tokens, late, late // others, number, ""))
    fit = fit_transfers(rooms)
    assert fit.sharing == sharing
    assert fit.alone_ns(2000) == pytest.approx(took(2000), rel=0.01)


class TestObservations:
    @pytest.fixture
    def times(self) -> TransferTimes:
        return TransferTimes()

    def test_rooms_that_overlap_share_the_time(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.begin(2, 200, 2000)
        assert times.in_transfer() == {1: 100, 2: 200}
        assert times.ahead(2500) == [(100, 1250.0), (200, 250.0)]
        times.end(1, ["a"], "bulk", 3000)  # 1000 alone, 1000 with the other
        times.end(2, ["b"], "slice", 4000)
        assert times._by_peer["a"][0] == Transferred(100, 2000, 1500, 3000, "bulk")
        assert times._by_peer["b"][0] == Transferred(200, 2000, 1500, 4000, "slice")
        assert times.in_transfer() == {}

    def test_the_end_is_when_the_last_rank_had_it_not_when_its_message_came(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.arrived(1, 1700)
        times.arrived(1, 1600)
        times.arrived(9, 1)
        times.end(1, ["a", "b"], "bulk", 6000)
        for peer in ("a", "b"):
            assert list(times._by_peer[peer]) == [Transferred(100, 700, 700, 1700, "bulk")]

    def test_a_cancelled_room_leaves_nothing(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.cancel(1, 2000)
        times.cancel(2, 2000)
        times.end(1, ["a"], "bulk", 3000)
        assert times.fit("a") is None
        times.begin(3, 100, 4000)
        assert times.ahead(5000) == [(100, 1000.0)]

    def test_a_peer_keeps_a_bounded_number_and_the_fit_follows(self, times: TransferTimes) -> None:
        for number in range(200):
            times.begin(number, 100, 1000 * number)
            times.end(number, ["a"], "bulk", 1000 * number + 10)
        fit = times.fit("a")
        assert fit is not None
        assert fit.rooms == 64
        assert times.fit("a") is fit
        times.begin(200, 100, 10**6)
        times.end(200, ["a"], "staged", 10**6 + 10)
        assert times.fit("a") is not fit


def test_a_new_room_waits_for_what_is_left_of_the_others() -> None:
    fit = TransferFit(10.0, 1.0, 0.5, 0.0, 1, 0, "")
    assert remaining_ns(fit, [(90, 40.0), (10, 50.0), (990, 0.0)]) == [500.0, 30.0]
