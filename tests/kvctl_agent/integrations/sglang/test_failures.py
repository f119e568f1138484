"""Rooms that an engine aborts or decode never opens, and servers that die or stop, as SGLang's queues see them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import Outcome, PDPair

MODEL = Model(heads=4, layers=2)
# With deferred release decode keeps the pages of a failed request until nothing is in flight: PDPair.settle checks it.
CASE = Case(
    "kvctl",
    Ranks(tp=2),
    Ranks(),
    MODEL,
    environment={
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "1",
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "10",
    },
)
FINE = [Room(100, tokens=100), Room(101, tokens=64, chunks=(32,))]


@pytest.fixture(scope="module")
def pair(sglang_process: None) -> Iterator[PDPair]:
    """A pair for tests in which no process ends."""
    with PDPair(CASE) as shared:
        yield shared


def pages_held(scheduler: Any) -> int:
    """Failed requests whose pages decode may not use again."""
    scheduler.transfers.resolve_deferred_releases()
    return len(scheduler.transfers._deferred_releases)


def check_others(outcome: Outcome, failed: set[int]) -> None:
    """Asserts that these rooms failed wherever they were known, and all others arrived whole."""
    for room in failed:
        assert {ended.state for ended in outcome.rooms[room].values()} == {"failed"}, outcome.rooms[room]
        assert all(ended.reason for ended in outcome.rooms[room].values())
    rest = {room: ends for room, ends in outcome.rooms.items() if room not in failed}
    Outcome(rest, outcome.stray).check()


@pytest.mark.sample
def test_aborts_of_either_side_fail_the_room_on_both_and_no_other(pair: PDPair) -> None:
    rooms = [
        Room(1, tokens=96, abort_prefill="bootstrapping"),
        Room(2, tokens=96, abort_decode="bootstrapping"),
        Room(3, tokens=96, chunks=(32,), abort_prefill="waiting"),
        Room(4, tokens=96, chunks=(32,), abort_decode="waiting"),
        Room(5, tokens=96, chunks=(32, 64), abort_prefill="chunk"),
        Room(6, tokens=96, chunks=(32,), held=True, abort_decode="transferring"),
    ]
    outcome = pair.transfer([*rooms, *FINE], window=8)
    check_others(outcome, {room.room for room in rooms})
    # Their pages and metadata rows are there for others.
    pair.transfer([Room(20 + i, tokens=480 if i == 5 else 96, chunks=(32,)) for i in range(8)], window=8).check()


def test_another_prompt_at_decode_fails_the_room_on_every_rank_of_both_servers() -> None:
    """Prompts of 90 and 96 tokens have equally many pages: nothing but their lengths tells them apart."""
    with PDPair(CASE) as pair:
        rooms = [
            Room(1, tokens=90, at_decode=(96, 0)),
            Room(2, tokens=96, at_decode=(90, 0), prefix=32),
            Room(3, tokens=96, chunks=(32,), at_decode=(96, 1)),
        ]
        outcome = pair.transfer([*rooms, *FINE], window=8)
        check_others(outcome, {room.room for room in rooms})
        # SGLang fails a request on all ranks as soon as one has failed, perhaps before the others' agents know why;
        # decode then has the cause from whichever rank of prefill tells first.
        elsewhere = "failed on another rank of this server"
        at_decode = outcome.reasons(1, "decode")
        assert "this side computes a prompt of 90 tokens, decode" in at_decode or elsewhere in at_decode
        reasons = outcome.reasons(1, "prefill")
        assert reasons.count("expects 96") >= 1
        assert reasons.count("expects 96") + reasons.count("another rank") == CASE.prefill.tp
        for room, cause in ((2, "a prompt of 96 tokens"), (3, "this side computes another prompt than decode")):
            at_decode = outcome.reasons(room, "decode")
            assert cause in at_decode or elsewhere in at_decode
            assert cause in outcome.reasons(room, "prefill")
        pair.transfer(FINE).check()


def test_room_that_decode_never_opens_fails_after_sglangs_bootstrap_timeout(pair: PDPair) -> None:
    outcome = pair.transfer([Room(7, opened=False), *FINE])
    check_others(outcome, {7})
    pair.transfer(FINE).check()


@pytest.mark.sample
def test_decode_fails_the_rooms_of_a_killed_prefill_and_serves_its_successor() -> None:
    with PDPair(CASE) as pair:
        pair.transfer(FINE).check()
        lost = [Room(8, tokens=96, chunks=(48,), held=True), Room(9, tokens=32)]
        pair.begin(lost, "decode")
        pair.begin(lost[:1], "prefill")  # it dies before it hears of the second
        pair.wait_event("decode", "opened", 8)
        pair.wait_event("prefill", "chunk", 8, count=2)
        pair.kill("prefill")
        outcome = pair.finish("decode")
        assert outcome.states(8, "decode") == {"failed"}
        assert outcome.states(9, "decode") == {"failed"}
        pair.ready(pair.launch("prefill"))
        assert not any(pair.settle().values())
        pair.transfer([Room(8, tokens=96), *FINE]).check()


def test_prefill_fails_the_rooms_of_a_killed_decode_and_serves_its_successor() -> None:
    with PDPair(CASE) as pair:
        lost = Room(10, tokens=480, chunks=(48,))
        pair.begin([lost], "decode")
        pair.begin([lost, *FINE[:1]], "prefill")
        pair.wait_event("prefill", "chunk", 10, count=2)
        pair.kill("decode")
        outcome = pair.finish("prefill")
        assert outcome.states(100, "prefill") == {"failed"}
        pair.ready(pair.launch("decode"))
        pair.transfer(FINE).check()


def test_rooms_go_on_when_a_frozen_decode_continues(pair: PDPair) -> None:
    rooms = [Room(11, tokens=480, chunks=(64, 128, 256)), *FINE]
    pair.begin(rooms, "decode")
    pair.begin(rooms, "prefill")
    pair.wait_event("prefill", "chunk", 11, count=2)
    pair.freeze("decode")
    pair.wait_event("prefill", "sent", 11, count=2)
    pair.thaw("decode")
    outcome = pair.finish("decode", pair.finish("prefill"))
    Outcome(outcome.rooms, pair.settle()).check()


def test_pages_are_held_while_a_frozen_prefill_could_write_to_them() -> None:
    with PDPair(dataclasses.replace(CASE, decode_environment={"KVCTL_LOST_S": "4"})) as pair:
        room = Room(12, tokens=96, chunks=(48,), held=True)
        pair.begin([room], "decode")
        pair.begin([room], "prefill")
        pair.wait_event("prefill", "chunk", 12, count=2)
        pair.freeze("prefill")
        assert pair.finish("decode").states(12, "decode") == {"failed"}
        (held,) = pair.call("decode", pages_held).values()
        assert held == 1
        pair.thaw("prefill")
        assert pair.finish("prefill").states(12, "prefill") == {"failed"}
        assert not any(pair.settle().values())  # which waits for their release
        pair.transfer(FINE).check()
