"""Room numbers that SGLang's queues cannot use, or that two requests have at once."""

import pytest

from tests.support.sglang import managers
from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair

CASE = Case("kvctl", Ranks(tp=2), Ranks(), Model(heads=4, layers=2))
FINE = [Room(100, tokens=100)]
USED = "room 1 is used by another request of this server: give each request its own bootstrap_room"


def test_of_two_requests_with_one_room_the_second_fails_and_says_why() -> None:
    room = Room(1, tokens=100)
    with PDPair(CASE) as pair:
        for twice, once in (("prefill", "decode"), ("decode", "prefill")):
            pair.begin([room], once)
            for ends in pair.call(twice, managers.serve_twice, room).values():
                assert [state for state, _ in ends] == ["failed", "success"], ends
                assert USED in ends[0][1]
            pair.finish(once).check()
        pair.transfer([room, *FINE]).check()


def test_room_0_is_refused_by_both_servers_at_once() -> None:
    """SGLang's decode queue would wait for it for ever."""
    with PDPair(CASE) as pair:
        outcome = pair.transfer([Room(0, tokens=100)])
        for role in ("prefill", "decode"):
            assert outcome.states(0, role) == {"failed"}
            assert "bootstrap_room 0 means no room to SGLang's decode servers" in outcome.reasons(0, role)
        pair.transfer(FINE).check()


def test_the_number_of_an_aborted_request_serves_another_at_once() -> None:
    aborted, again = Room(1, tokens=96, abort_prefill="waiting", held=True), Room(1, tokens=96)
    with PDPair(CASE) as pair:
        pair.begin([again], "decode")
        assert {state for ((state, _),) in pair.call("prefill", managers.serve, [aborted]).values()} == {"failed"}
        assert pair.finish("decode").states(1, "decode") == {"failed"}
        pair.transfer([again, *FINE]).check()


@pytest.mark.parametrize("dp_attention", [True, False])
def test_decode_learns_that_the_wrong_dp_rank_of_prefill_has_got_the_request(dp_attention: bool) -> None:
    """SGLang's own backends let it wait until its timeout."""
    servers = Ranks(dp=2, dp_attention=dp_attention)
    with PDPair(Case("kvctl", servers, servers, Model(heads=4, layers=2))) as pair:
        pair.transfer([Room(2, tokens=100), Room(3, tokens=100, decode_dp=1)]).check()
        outcome = pair.transfer([Room(1, tokens=100, prefill_dp=0, decode_dp=1)])
        for role in ("prefill", "decode"):
            assert outcome.states(1, role) == {"failed"}
            assert "dispatched to dp_rank 0 but bootstrap_room 1 implies dp_rank 1" in outcome.reasons(1, role)
        pair.transfer([Room(1, tokens=100), Room(4, tokens=100)]).check()
