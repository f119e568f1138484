"""Where a room is opened, and how its keeper ends it: the decode rank through which all other ranks are connected."""

from __future__ import annotations

import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import keeper
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from tests.support.protocol.moments import connected, give, messages_to, run_until, said
from tests.support.protocol.simulation import SECOND, World, direct, registry

KEPT_BY_0 = next(room for room in range(99) if keeper(World(decode=ParallelConfig(tp=2)).inputs, room, 0) == 0)


def opening() -> World:
    """Room `KEPT_BY_0` passes between two prefill and two decode ranks; no message about it is delivered yet."""
    world = connected(ParallelConfig(tp=2), ParallelConfig(tp=2), choose=direct)
    for reader in (0, 1):
        world.receive(KEPT_BY_0, 2, reader=reader, nonce=1000 + reader)
    return world


def opened() -> World:
    """The same; the room is open and has not been computed."""
    world = opening()
    world.flush()
    return world


def compute(world: World, *ranks: int) -> None:
    """Lets prefill ranks compute the room and write it to their decode ranks."""
    world.send(KEPT_BY_0, 2, ranks=ranks)
    world.flush()


def states(world: World) -> dict[str, RoomState]:
    found = {name: state for (name, _), state in world.sent.items()}
    return found | {room.reader: room.state for room in world.rooms.values()}


def causes(world: World) -> set[tuple[str, str]]:
    failures = [*world.sent_failures.values(), *(room.failure for room in world.rooms.values())]
    return {(failure["rank"], failure["code"]) for failure in failures if failure is not None}


# ---- openings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "openings", "kept_at"),
    [
        (ParallelConfig(), ParallelConfig(), 1, 0),
        (ParallelConfig(tp=4), ParallelConfig(), 4, 0),
        (ParallelConfig(), ParallelConfig(tp=4), 4, 0),
        (ParallelConfig(tp=2), ParallelConfig(tp=2), 2, 1),
        (ParallelConfig(tp=4), ParallelConfig(tp=4), 4, 3),
        (ParallelConfig(dp=4), ParallelConfig(dp=4), 1, 0),
        (ParallelConfig(dp=2, tp=2), ParallelConfig(tp=2), 2, 1),
    ],
)
def test_a_room_is_opened_where_it_is_written_and_its_keeper_is_known_wherever_it_is_computed(
    prefill: ParallelConfig, decode: ParallelConfig, openings: int, kept_at: int
) -> None:
    world = World(prefill, decode)
    world.connect()
    for reader in range(decode.tp):
        world.receive(6, 2, reader=reader)
    found = [name for name in world.prefill_names for _ in messages_to(world, name, msg.RoomOpen)]
    kept = [name for name in world.prefill_names for _ in messages_to(world, name, msg.RoomKept)]
    assert (len(found), len(kept)) == (openings, kept_at)
    assert {*found, *kept} == {world.prefill_names[rank] for rank in world.prefill_ranks(6)}
    world.send(6, 2)
    world.settle()
    assert set(states(world).values()) == {RoomState.SUCCESS}
    assert world.now_ns == SECOND, "nothing waited for a resend"
    world.check_empty()


def test_the_keeper_does_not_wait_until_all_ranks_know_it() -> None:
    world = opening()
    (lost,) = messages_to(world, "prefill-1", msg.RoomKept)
    world.pool.remove(lost)
    compute(world, 0)
    assert states(world)["decode-0"] is RoomState.SUCCESS
    with pytest.raises(
        LocalProtocolError, match=f"room {KEPT_BY_0} has not ended yet: its keeper is unknown to prefill-1"
    ):
        world.receive(KEPT_BY_0, 2, reader=0, nonce=2000)
    del world.rooms["decode-0", KEPT_BY_0, 2000]
    compute(world, 1)
    assert not states(world)["prefill-1"].finished
    world.settle()
    assert set(states(world).values()) == {RoomState.SUCCESS}
    world.check_empty()


def test_a_rank_that_only_knows_the_keeper_cannot_accept_the_room_in_the_place_of_another() -> None:
    world = opening()
    give(world, msg.RoomAccepted(KEPT_BY_0, 1000), to="decode-0", by="prefill-1")
    assert states(world)["decode-0"] is RoomState.BOOTSTRAPPING


@pytest.mark.parametrize("by", [0, 1])
def test_a_rank_that_must_open_a_room_cannot_keep_it_instead(by: int) -> None:
    world = connected(ParallelConfig(tp=2), ParallelConfig(tp=2))
    give(world, msg.RoomKept(KEPT_BY_0, 5, world.p(by).local.incarnation), to=f"prefill-{by}", by=f"decode-{by}")
    (refusal,) = said(world, f"decode-{by}")
    assert isinstance(refusal, msg.RoomRefused)
    assert (refusal.code, refusal.text) == (
        "KV_PLAN_MISMATCH",
        f"decode-{by} cannot keep room {KEPT_BY_0} without opening it",
    )
    assert not world.p(by).rooms


def test_a_dp_group_goes_on_without_a_lost_rank_of_another_one() -> None:
    world = connected(ParallelConfig(dp=2))
    world.kill("prefill-1")
    world.receive(6, 2)
    world.receive(7, 2)
    world.send(6, 2)
    world.flush()
    assert world.rooms["decode-0", 6, 1000].state is RoomState.SUCCESS
    for _ in range(5):
        world.tick(SECOND)
    failure = world.rooms["decode-0", 7, 1001].failure
    assert failure["code"] == "KV_PEER_LOST"
    assert "prefill-1" in failure["text"]


def test_a_prefill_rank_ends_no_room_that_the_keeper_has_not_opened_yet_and_does_not_wait_for_it_before() -> None:
    world = connected(ParallelConfig(tp=2), ParallelConfig(tp=2), choose=direct)
    world.receive(KEPT_BY_0, 2, reader=1)
    compute(world, 1)
    assert world.rooms["decode-1", KEPT_BY_0, 1000].state is RoomState.SUCCESS
    assert world.sent["prefill-1", KEPT_BY_0] is RoomState.TRANSFERRING
    assert ("prefill-1", KEPT_BY_0) in world.sent_released
    world.receive(KEPT_BY_0, 2, reader=0)
    compute(world, 0)
    assert set(states(world).values()) == {RoomState.SUCCESS}
    assert world.now_ns == SECOND, "nothing waited for a resend"


@pytest.mark.parametrize("side", [ParallelConfig(tp=2), ParallelConfig(dp=2)])
def test_a_registry_that_names_fewer_ranks_than_these_say_costs_rooms_only(side: ParallelConfig) -> None:
    world = World(side, ParallelConfig(), choose=direct)
    world.connect()
    world.feed("decode-0", ev.RosterKnown(registry(0), world.prefill_names[:1]))
    world.flush()
    world.receive(7, 2)
    failure = world.rooms["decode-0", 7, 1000].failure
    assert failure["code"] == "KV_PLAN_MISMATCH"
    assert "the registry names 1 of the instance's 2 ranks" in failure["text"]


# ---- success -------------------------------------------------------------------------------------------------------


def test_a_message_about_an_ended_room_is_answered() -> None:
    world = opened()
    compute(world, 0, 1)
    world.settle()
    told = msg.ReadersDone(KEPT_BY_0, 1000)
    world.feed("decode-0", ev.Received("prefill-1", world.machines["prefill-1"].local.incarnation, told))
    assert said(world, "prefill-1") == [msg.RoomDone(KEPT_BY_0, 1000)]


def test_the_keeper_says_since_when_all_have_the_room() -> None:
    """Routers are told how long transfers take, and the way of the news is no part of that."""
    for first, news in ((0, msg.ReadersDone), (1, msg.RoomDone)):
        world = opened()
        compute(world, first)
        world.tick(SECOND)
        world.flush()
        world.send(KEPT_BY_0, 2, ranks=[1 - first])
        while not (lost := [item for name in world.machines for item in messages_to(world, name, news)]):
            world.happen(world.pool.pop(world.ready()[0]))
        world.pool = [item for item in world.pool if item not in lost]
        since_ns = world.now_ns
        while not (found := messages_to(world, "prefill-0", msg.RoomDone)):
            if places := world.ready():
                world.happen(world.pool.pop(places[0]))
            else:
                world.tick(SECOND)
        (done,) = codec.decode(found[0].what)[1]
        assert done == msg.RoomDone(KEPT_BY_0, 1000, world.now_ns - since_ns)
        assert world.now_ns > since_ns


# ---- failure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["decode-0", "decode-1", "prefill-0", "prefill-1"])
def test_a_failure_anywhere_reaches_every_rank(failing: str) -> None:
    world = opened()
    world.send(KEPT_BY_0, 2)
    run_until(world, "engine")
    world.feed(failing, ev.AbortRoom(KEPT_BY_0, "the client went away"))
    world.settle()
    assert set(states(world).values()) == {RoomState.FAILED}
    assert causes(world) == {(failing, "ABORTED")}
    assert world.now_ns == SECOND, "nothing waited for a resend"
    world.check_empty()


def test_a_late_question_about_a_failure_that_was_passed_on_is_not_answered_by_success() -> None:
    world = opened()
    compute(world, 0)
    world.feed("decode-1", ev.AbortRoom(KEPT_BY_0, "the client went away"))
    world.settle()
    asked = msg.PartReady(KEPT_BY_0, 1000, [])
    world.feed("decode-0", ev.Received("prefill-0", world.machines["prefill-0"].local.incarnation, asked))
    (answer,) = said(world, "prefill-0")
    assert isinstance(answer, msg.RoomFailed)


def test_a_keeper_finds_out_that_a_rank_has_ended_the_room_in_a_silence() -> None:
    """The rank took the keeper for lost, and the keeper heard that rank all the time."""
    world = opened()
    compute(world, 0)
    while world.p(1).rooms:
        world.tick(SECOND)
        world.pool = [item for item in world.pool if (item.to, item.by) != ("prefill-1", "decode-0")]
        world.flush()
    assert world.d(0).peers["prefill-1"].usable
    assert world.d(0).rooms[KEPT_BY_0].awaited == {"prefill-1"}
    world.settle()
    assert states(world)["prefill-0"] is RoomState.FAILED
    assert world.sent_failures["prefill-0", KEPT_BY_0]["rank"] == "prefill-1"
    world.check_empty()


def test_the_loss_of_a_rank_that_has_sent_everything_harms_no_other() -> None:
    world = opened()
    compute(world, 0)
    world.kill("prefill-0")
    compute(world, 1)
    assert states(world) == dict.fromkeys(("decode-0", "decode-1", "prefill-1"), RoomState.SUCCESS)


# ---- recall --------------------------------------------------------------------------------------------------------
