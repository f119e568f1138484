"""Transfer times: what is observed of rooms that overlap, and what the fit makes of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvctl_agent.observer import transfer_times
from kvctl_agent.observer.transfer_times import Ahead, TransferFit, Transferred, TransferTimes, fit_transfers

MS = 1_000_000
FIXED, PER_TOKEN = 2 * MS, 10_000


def took(tokens: int) -> int:
    return FIXED + tokens * PER_TOKEN


def alone(*tokens: int) -> list[Transferred]:
    return [Transferred(each, took(each), at, "bulk") for at, each in enumerate(tokens)]


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
        each._replace(took_ns=late)
        for each in alone(*(source.randint(16, 16_000) for _ in range(64)))
        for late in [round(each.took_ns * (source.uniform(0.9, 1.1) if source.random() < 0.85 else 5))]
    ]
    fit = fit_transfers(rooms)
    assert 0.02 < fit.error_ratio < 0.15
    for tokens in (16, 500, 16_000):
        assert fit.alone_ns(tokens) == pytest.approx(took(tokens), rel=0.2)


def test_recent_rooms_weigh_more() -> None:
    slow = [each._replace(took_ns=3 * each.took_ns) for each in alone(*range(100, 3000, 100))]
    fit = fit_transfers([*alone(*range(100, 3000, 100)), *slow, *slow])
    assert fit.alone_ns(1000) == pytest.approx(3 * took(1000), rel=0.1)


def test_rooms_of_one_size_have_a_rate_and_no_fixed_time() -> None:
    fit = fit_transfers(alone(*[512] * 6))
    assert (fit.fixed_ns, fit.ns_per_token) == (0, pytest.approx(took(512) / 512))


def test_times_that_fall_with_the_size_are_all_fixed() -> None:
    fit = fit_transfers([each._replace(tokens=5000 - each.tokens) for each in alone(100, 2000, 4900)])
    assert fit.ns_per_token == 0
    assert fit.fixed_ns > 0


@pytest.mark.parametrize("queueing", [1.0, 0.0])
def test_whether_rooms_wait_for_each_other_is_learnt(queueing: float) -> None:
    rooms = []
    for number, tokens in enumerate(range(100, 6000, 300)):
        # The first of the rooms ahead has 2000 tokens, and 500 of them are sent.
        ahead = Ahead(2000 + 700 * number, 2000, FIXED + 500 * PER_TOKEN) if number % 3 else Ahead()
        left = (ahead.tokens - 500) * PER_TOKEN if ahead.tokens else 0
        rooms.append(Transferred(tokens, took(tokens) + round(queueing * left), number, "", ahead))
    fit = fit_transfers(rooms)
    assert fit.queueing == queueing
    assert fit.alone_ns(2000) == pytest.approx(took(2000), rel=0.01)
    assert fit.wait_ns(Ahead(3000, 2000, FIXED + 500 * PER_TOKEN)) == pytest.approx(
        2500 * PER_TOKEN * queueing, rel=0.02
    )
    assert fit.wait_ns(Ahead()) == 0


class TestObservations:
    @pytest.fixture
    def times(self) -> TransferTimes:
        return TransferTimes()

    def test_a_room_knows_which_were_ahead(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.begin(2, 200, 2000)
        times.begin(3, 400, 2500)
        assert times.in_transfer() == {1: 100, 2: 200, 3: 400}
        assert times.ahead(2600) == Ahead(700, 100, 1600)
        times.end(2, ["b"], "slice", 2700)
        times.end(1, ["a"], "bulk", 3000)
        assert times.ahead(3300) == Ahead(400, 400, 300)  # the first since 3000
        times.end(3, ["a"], "bulk", 4000)
        assert times.ahead(9000) == Ahead()
        assert list(times._by_peer["a"].rooms) == [
            Transferred(100, 2000, 3000, "bulk"),
            Transferred(400, 1500, 4000, "bulk", Ahead(300, 100, 1500)),
        ]
        assert list(times._by_peer["b"].rooms) == [Transferred(200, 700, 2700, "slice", Ahead(100, 100, 1000))]
        times.begin(4, 100, 10_000)
        assert times.ahead(10_500) == Ahead(100, 100, 500)

    def test_the_end_is_when_the_last_rank_had_it_not_when_its_message_came(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.arrived(1, "a", 1700, None)
        times.arrived(1, "b", 1600, None)
        times.arrived(9, "a", 1, None)
        times.end(1, ["a", "b"], "bulk", 6000)
        for peer in ("a", "b"):
            assert list(times._by_peer[peer].rooms) == [Transferred(100, 700, 1700, "bulk")]

    def test_the_message_took_half_of_the_shortest_round_trip(self, times: TransferTimes) -> None:
        for room, rtt, took in ((1, 400, 800), (2, 900, 800), (3, 200, 900), (4, None, 900)):
            times.begin(room, 100, 1000)
            times.arrived(room, "a", 2000, rtt)
            times.end(room, ["a"], "bulk", 3000)
            assert times._by_peer["a"].rooms[-1].took_ns == took

    def test_a_round_trip_that_was_slow_does_not_shorten_a_room_by_much(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.arrived(1, "a", 2000, 10**9)
        times.end(1, ["a"], "bulk", 3000)
        assert times._by_peer["a"].rooms[-1].took_ns == 750

    def test_a_cancelled_room_leaves_nothing(self, times: TransferTimes) -> None:
        times.begin(1, 100, 1000)
        times.cancel(1, 2000)
        times.cancel(2, 2000)
        times.end(1, ["a"], "bulk", 3000)
        assert times.fit("a", 3000) is None
        times.begin(3, 100, 4000)
        assert times.ahead(5000) == Ahead(100, 100, 1000)

    def test_a_peer_keeps_a_bounded_number_and_the_fit_follows(self, times: TransferTimes) -> None:
        for number in range(200):
            times.begin(number, 100, 1000 * number)
            times.end(number, ["a"], "bulk", 1000 * number + 10)
        fit = times.fit("a", 10**6)
        assert fit is not None
        assert fit.rooms == 64
        assert times.fit("a", 10**12) is fit
        times.begin(200, 100, 10**12)
        times.end(200, ["a"], "staged", 10**12 + 10)
        latest = times.fit("a", 10**12 + 20)
        assert latest is not None
        assert (latest.ended_ns, latest.path) == (10**12 + 10, "staged")

    def test_a_fit_is_kept_for_a_second_or_until_there_are_twice_as_many_rooms(
        self, times: TransferTimes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fits: list[int] = []

        def counted(rooms: Any) -> TransferFit:
            fits.append(len(rooms))
            return fit_transfers(rooms)

        monkeypatch.setattr(transfer_times, "fit_transfers", counted)
        for number in range(40):  # a room and a question every 100 ms
            times.begin(number, 100, 100 * MS * number)
            times.end(number, ["a"], "bulk", 100 * MS * number + 10)
            times.fit("a", 100 * MS * number + 20)
        assert fits == [1, 2, 4, 8, 16, 26, 36]

    def test_the_least_recently_used_peer_gives_way_to_a_new_one(
        self, times: TransferTimes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(transfer_times, "_MOST_PEERS", 2)
        for room, peer in enumerate(("a", "b", "a", "c")):
            times.begin(room, 100, 1000 * room)
            times.arrived(room, peer, 1000 * room + 900, 400)
            times.end(room, [peer], "bulk", 1000 * room + 950)
        fits = {peer: times.fit(peer, 5000) for peer in ("a", "b", "c")}
        assert {peer: fit and fit.rooms for peer, fit in fits.items()} == {"a": 2, "b": None, "c": 1}
        assert times._by_peer["c"].rooms[-1].took_ns == 900 - 200
