"""The manager of the backend `kvctl` between requests: sleep mode, its end before a role switch; states of rooms."""

from collections.abc import Iterator

import pytest

from kvctl_agent.contract.states import RoomState
from tests.support.sglang import managers
from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair

CASE = Case("kvctl", Ranks(tp=2), Ranks(), Model(heads=4, layers=2))


def test_servers_serve_again_after_sleep_mode_and_after_a_role_switch() -> None:
    with PDPair(CASE) as pair:
        pair.transfer([Room(1, tokens=100)]).check()
        pair.call("decode", managers.sleep_and_wake)
        pair.transfer([Room(2, tokens=100)]).check()
        pair.call("prefill", managers.sleep_and_wake)
        pair.transfer([Room(3, tokens=100)]).check()
        for role in ("prefill", "decode"):
            assert set(map(tuple, pair.call(role, managers.rebuild).values())) == {()}
        pair.transfer([Room(4, tokens=100)]).check()


@pytest.mark.parametrize(
    ("model", "state"),
    [
        (Model(layers=2, draft_layers=1), {"draft": "bfloat16"}),
        (Model(state="swa"), {"swa_0": "bfloat16"}),
        # Three blocks of the convolution, and the state between tokens.
        (Model(state="mamba"), {**dict.fromkeys(("mamba_0", "mamba_1", "mamba_2"), "bfloat16"), "mamba_3": "float32"}),
    ],
)
def test_both_servers_tell_the_dtypes_of_sglangs_pools(model: Model, state: dict[str, str]) -> None:
    with PDPair(Case("kvctl", Ranks(), Ranks(), model)) as pair:
        for role in ("prefill", "decode"):
            assert list(pair.call(role, managers.dtypes).values()) == [{"kv": "bfloat16", **state}]


def test_both_ends_of_a_room_have_the_id_of_its_request() -> None:
    """SGLang gives a sender no more than the room's number."""
    with PDPair(CASE) as pair:
        pair.transfer([Room(1, tokens=100), Room(2, tokens=100, prefix=64)]).check()
        for role in ("prefill", "decode"):
            assert set(map(frozenset, pair.call(role, managers.request_ids).values())) == {
                frozenset({"request-1", "request-2"})
            }, role


@pytest.fixture(scope="module")
def pair(sglang_process: None) -> Iterator[PDPair]:
    """A pair for tests that leave nothing behind; each takes rooms of its own."""
    with PDPair(CASE) as shared:
        yield shared


@pytest.mark.parametrize(("number", "prefix"), [(1, 0), (2, 64)])
def test_a_room_that_decode_has_opened_waits_for_input_from_the_first_poll_on(
    pair: PDPair, number: int, prefix: int
) -> None:
    """A scheduler polls once per forward: a state that comes a moment later costs the request a whole forward."""
    room = Room(number, tokens=100, prefix=prefix)
    pair.begin([room], "decode")
    served = pair.call("prefill", managers.serve_opened, room)
    assert set(served.values()) == {(RoomState.WAITING_FOR_INPUT, "success")}
    pair.finish("decode").check()


def test_a_sent_room_ends_before_decode_confirms_it_and_another_of_its_number_waits(pair: PDPair) -> None:
    """As with SGLang's own backends, whose requests do not wait on a prefill rank for what decode does with the KV."""
    room = Room(3, tokens=100)
    pair.begin([room], "decode")
    assert set(pair.call("prefill", managers.serve_unconfirmed, room).values()) == {"success"}
    pair.finish("decode").check()
    pair.begin([room], "decode")
    served = pair.call("prefill", managers.serve_again, room)
    assert set(served.values()) == {(RoomState.BOOTSTRAPPING, "success")}
    pair.finish("decode").check()
    pair.transfer([Room(4, tokens=100)]).check()


def test_nothing_is_kept_of_a_prefill_server_that_has_ended(pair: PDPair) -> None:
    assert set(pair.call("decode", managers.forget_dead_server).values()) == {0}


def test_requests_at_wrong_dp_ranks_take_a_bounded_number_of_threads(pair: PDPair) -> None:
    assert set(pair.call("prefill", managers.decline_many).values()) <= {0, 16}


def test_the_end_of_a_room_is_not_taken_for_that_of_the_next_one_with_its_number(pair: PDPair) -> None:
    served = pair.call("prefill", managers.begin_beside_endings)
    assert {tuple(states) for states in served.values()} == {(RoomState.BOOTSTRAPPING, RoomState.FAILED)}


def test_peers_are_told_why_a_room_ended_that_sglang_failed_on_another_rank_first(pair: PDPair) -> None:
    causes = pair.call("prefill", managers.end_unfinished)
    failed, known, cleared = next(iter(causes.values()))
    assert failed == "failed on another rank of this server, which knows why"
    assert (known, cleared) == ("pages are missing", "cleared by the scheduler")
