"""Peers and prefill instances that are not needed any more are forgotten, and met again like new ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import PeerState
from tests.support.folded import folded
from tests.support.protocol.moments import pass_time
from tests.support.protocol.simulation import SECOND, TIMING, Instance, World, registry

LOST_S, KEPT_S = TIMING.lost_ns // SECOND, TIMING.bootstrap_ns // SECOND
NAMED = Instance(ParallelConfig(tp=2), introduced=False)  # only requests name it
RANKS = ("p1-prefill-0", "p1-prefill-1")


def served(**options: Any) -> World:
    """A request has named instance 1, whose room is over; the decode rank was created with instance 0."""
    world = World(ParallelConfig(), ParallelConfig(), others=[NAMED], **options)
    world.connect()
    room = world.receive(8, 4, instance=1)
    world.flush()
    world.send(8, 4, instance=1)
    world.settle()
    assert room.state is RoomState.SUCCESS
    assert set(world.d().peers) == {"prefill-0", *RANKS}
    return world


def close(world: World, name: str, *, drained: bool = True) -> None:
    world.feed(name, ev.Shutdown(drained))
    world.flush()
    world.kill(name, proven=False)


def again(world: World, number: int) -> None:
    """A room that names instance 1 connects to it and succeeds."""
    room = world.receive(number, 4, instance=1)
    world.flush()
    world.send(number, 4, instance=1)
    world.settle()
    assert room.state is RoomState.SUCCESS
    world.check_empty()


def counted(world: World, name: str) -> int:
    return int(world.machines[name].telemetry.metrics.total("kvctl_peers_forgotten_total"))


def asked(world: World, peer: str, *, force: bool = False, of: str = "prefill-0") -> ev.Answered:
    """Lets an operator ask an agent to forget a peer; returns the answer."""
    actions = world.machines[of].handle(ev.Forget(5, peer, force), world.now_ns)
    for action in actions:
        world._act(of, action)
    (answer,) = [action for action in actions if isinstance(action, ev.Answered)]
    return answer


class TestInstancesThatRequestsNamed:
    def test_one_that_has_closed_is_forgotten_at_once_and_found_again_when_a_room_names_it(self) -> None:
        world = served()
        for name in RANKS:
            close(world, name)
        world.tick(0)
        assert set(world.d().peers) == {"prefill-0"}
        assert world.d().instances == (registry(0),)
        assert counted(world, "decode-0") == 2
        kinds = [event["kind"] for event in folded(world.d().telemetry).recorder.since(None, 99)["events"]]
        assert (kinds.count("peer-forgotten"), kinds.count("instance-forgotten")) == (2, 1)
        for name in RANKS:
            world._start(name)
        again(world, 9)

    def test_one_of_whose_ranks_one_has_closed_stays(self) -> None:
        world = served()
        close(world, RANKS[0])
        pass_time(world, 2 * KEPT_S)
        assert set(world.d().peers) == {"prefill-0", *RANKS}

    @pytest.mark.parametrize(("proven", "kept_s"), [(True, LOST_S), (False, LOST_S + KEPT_S)])
    def test_one_that_has_died_is_kept_for_longer_without_proof(self, proven: bool, kept_s: int) -> None:
        world = served()
        for name in RANKS:
            world.kill(name, proven=proven)
        pass_time(world, kept_s - 2)
        assert set(world.d().peers) == {"prefill-0", *RANKS}
        pass_time(world, 4)
        assert set(world.d().peers) == {"prefill-0"}
        for name in RANKS:
            world._start(name)
        again(world, 9)

    def test_one_that_is_idle_and_well_stays(self) -> None:
        world = served()
        pass_time(world, 2 * KEPT_S)
        assert world.d().instances == (registry(0), registry(1))

    def test_one_that_the_agent_was_created_with_or_has_connected_to_stays(self) -> None:
        world = served()
        world.feed("decode-0", ev.ConnectInstance(registry(1)))
        for name in ("prefill-0", *RANKS):
            close(world, name)
        pass_time(world, 2 * KEPT_S)
        assert world.d().instances == (registry(0), registry(1))
        assert set(world.d().peers) == {"prefill-0", *RANKS}

    def test_one_that_never_answered_is_forgotten_some_time_after_its_rooms_have_failed(self) -> None:
        world = World(ParallelConfig(), ParallelConfig(), others=[Instance(ParallelConfig(), answers=False)])
        world.connect()
        room = world.receive(8, 4, instance=1)
        pass_time(world, LOST_S + 2)
        assert room.failure["code"] == "KV_ROOM_STUCK_BOOTSTRAP"
        pass_time(world, KEPT_S - 1)
        assert registry(1) in world.d().instances, "its ranks may come, and should learn that the room has failed"
        pass_time(world, LOST_S + 2)
        assert world.d().instances == (registry(0),)

    def test_memory_that_it_may_still_write_outlives_it(self) -> None:
        """A frozen server that is forgotten and goes on is asked to drain, and can be used again."""
        world = served()
        room = world.receive(9, 4, instance=1)
        world.flush()
        world.paused |= set(RANKS)
        pass_time(world, LOST_S + KEPT_S + 5)
        assert world.d().instances == (registry(0),)
        assert (room.state, room.released, set(world.d().peers)) == (RoomState.FAILED, False, {"prefill-0", *RANKS})
        assert world.d().quarantined_bytes > 0
        world.paused.clear()
        pass_time(world, LOST_S + 5)
        assert (room.released, world.d().quarantined_bytes, set(world.d().peers)) == (True, 0, {"prefill-0"})
        again(world, 10)


class TestTooManyInstances:
    def limited(self, most: int) -> World:
        world = World(ParallelConfig(), ParallelConfig(), others=[Instance(ParallelConfig(), answers=False)] * 4)
        machine = world.d()
        machine._context.local = msgspec.structs.replace(machine.local, max_instances=most)
        world.connect()
        return world

    def test_the_one_named_least_recently_that_never_answered_is_given_up(self) -> None:
        world = self.limited(3)
        rooms = {}
        for instance in (1, 2, 3):
            world.tick(1)
            rooms[instance] = world.receive(10 + instance, 4, instance=instance)
        assert world.d().instances == (registry(0), registry(2), registry(3))
        assert rooms[1].failure["text"] == (
            f"room 11: its prefill instance at {registry(1)} was given up: requests name more than 3"
        )
        assert (rooms[2].failure, rooms[3].failure) == (None, None)

    def test_one_without_rooms_is_given_up_before_one_with_rooms(self) -> None:
        world = self.limited(3)
        kept = world.receive(11, 4, instance=1)
        world.tick(1)
        world.feed("decode-0", ev.RenewRooms(registry(2), (12,)))
        world.tick(1)
        world.receive(13, 4, instance=3)
        assert world.d().instances == (registry(0), registry(1), registry(3))
        assert kept.failure is None

    def test_the_rooms_of_one_that_serves_go_on(self) -> None:
        world = served()
        world.d()._context.local = msgspec.structs.replace(world.d().local, max_instances=2)
        busy = world.receive(9, 4, instance=1)
        world.flush()
        world.instances = (*world.instances, Instance(ParallelConfig(), answers=False))
        flood = [world.receive(100 + number, 4, instance=2) for number in range(3)]
        assert {room.failure["code"] for room in flood} == {"KV_PEER_LOST"}
        world.send(9, 4, instance=1)
        world.settle()
        assert busy.state is RoomState.SUCCESS

    def test_one_that_the_engine_connects_to_is_kept_at_the_limit(self) -> None:
        world = served()
        machine = world.d()
        machine._context.local = msgspec.structs.replace(machine.local, max_instances=1)
        actions = machine.handle(ev.ConnectInstance(registry(7)), world.now_ns)
        assert registry(7) in machine.instances
        assert ev.ForgetInstance(registry(7)) not in actions

    def test_one_that_lacks_descriptors_is_looked_up_again_when_another_has_made_room(self) -> None:
        world = self.limited(9)
        for instance in (1, 2):
            world.tick(1)
            world.receive(10 + instance, 4, instance=instance)
        world.feed("decode-0", ev.InstanceUnreachable(registry(2), "32 more file descriptors are needed"))
        assert world.d().instances == (registry(0), registry(2))
        actions = world.d().handle(ev.Tick(), world.now_ns)
        assert actions.count(ev.FindInstance(registry(2))) == 1
        assert ev.FindInstance(registry(2)) not in world.d().handle(ev.Tick(), world.now_ns)


def connected() -> World:
    world = World(ParallelConfig(), ParallelConfig(dp=2))
    world.connect()
    return world


class TestDecodeRanks:
    """A prefill rank forgets decode ranks: each restart of a server may have another name."""

    def test_one_that_has_closed_is_forgotten_at_once(self) -> None:
        world = connected()
        close(world, "decode-1")
        world.tick(0)
        assert set(world.p().peers) == {"decode-0"}
        assert set(world.p().state.credits) == set(world.p().state.parked) == {"decode-0"}
        assert counted(world, "prefill-0") == 1

    def test_one_that_has_died_is_kept_as_long_as_a_room_may_wait_for_it(self) -> None:
        world = connected()
        world.kill("decode-1")
        pass_time(world, KEPT_S - 2)
        assert world.p().peers["decode-1"].state is PeerState.LOST
        pass_time(world, 4)
        assert set(world.p().peers) == {"decode-0"}

    def test_one_that_comes_back_in_time_stays(self) -> None:
        world = connected()
        world.kill("decode-1")
        pass_time(world, KEPT_S - 5)
        world._start("decode-1")
        pass_time(world, 20)
        assert world.p().peers["decode-1"].state is PeerState.READY

    def test_one_is_kept_while_a_write_to_it_is_in_flight(self) -> None:
        world = connected()
        world.receive(8, 2)
        world.flush()
        world.send(8, 2)
        while not world.flying:
            world.happen(world.pool.pop(world.ready()[0]))
        world.feed("prefill-0", ev.Received("decode-0", world.life("decode-0"), msg.Bye(drained=True)))
        world.feed("prefill-0", ev.Tick())
        assert "decode-0" in world.p().peers
        answer = asked(world, "decode-0")
        assert (answer.result, answer.text.split(":")[0]) == (
            "refused",
            "writes of 1 room to decode-0 have not ended, and read this rank's pages",
        )

    def test_one_that_is_refused_and_gone_is_forgotten(self) -> None:
        world = connected()
        who = msgspec.structs.replace(world.d().local.peer_info(), name="other", transport="mooncake")
        for _ in range(KEPT_S + 5):  # it repeats its Hello
            world.feed("prefill-0", ev.Received("other", 500, msg.Hello(msg.PROTOCOL_VERSION, who)))
            world.tick(SECOND)
        assert world.p().peers["other"].state is PeerState.REFUSED
        pass_time(world, KEPT_S + 1)
        assert "other" not in world.p().peers

    def test_one_that_is_still_there_is_asked_to_introduce_itself_again(self) -> None:
        """It was frozen, or cut off in one direction, for so long that it was forgotten."""
        world = connected()
        world.p().peers["decode-1"].closed = True
        world.p()._sessions.lose(world.p().peers["decode-1"], proven=False, text="for the test")
        world.feed("prefill-0", ev.Tick())
        assert "decode-1" not in world.p().peers
        opened = world.receive(9, 2, reader=1)  # before it notices
        pass_time(world, 3)
        assert world.p().peers["decode-1"].state is PeerState.READY
        world.send(9, 2)
        world.settle()
        assert opened.state is RoomState.SUCCESS

    def test_an_instance_that_is_disconnected_does_not_miss_the_decode_rank(self) -> None:
        world = connected()
        world.feed("decode-1", ev.DisconnectInstance(registry(0)))
        world.flush()
        world.tick(0)
        assert set(world.p().peers) == {"decode-0"}
        world.feed("decode-1", ev.ConnectInstance(registry(0)))
        world.flush()
        assert world.p().peers["decode-1"].state is PeerState.READY

    def test_an_operator_has_one_forgotten_that_is_lost(self) -> None:
        world = connected()
        assert asked(world, "decode-1").text == (
            "decode-1 is ready, heard 0.0 s ago: only a lost peer can be forgotten"
        )
        assert asked(world, "nobody").result == "unchanged"
        world.kill("decode-1")
        assert asked(world, "decode-1").result == "forgotten"
        assert set(world.p().peers) == {"decode-0"}


class TestOperatorOnADecodeRank:
    def quarantined(self) -> tuple[World, Any]:
        world = served()
        room = world.receive(9, 4, instance=1)
        world.flush()
        world.paused |= set(RANKS)
        pass_time(world, LOST_S + 2)
        return world, room

    def test_memory_that_the_peer_may_write_is_freed_only_by_force(self) -> None:
        world, room = self.quarantined()
        answer = asked(world, RANKS[0], of="decode-0")
        assert answer.result == "refused"
        assert answer.text.startswith(f"room 9: {RANKS[0]} (process 2 on its host) may still write to it")
        assert registry(1) in world.d().instances
        answer = asked(world, RANKS[0], force=True, of="decode-0")
        assert answer.text == f"{RANKS[0]} is forgotten; the memory of 1 room is freed by force"
        assert answer.drained == (RANKS[0],)
        assert set(world.d().peers) == {"prefill-0", RANKS[1]}, "the other rank may still write"
        assert not room.released
        asked(world, RANKS[1], force=True, of="decode-0")
        assert (room.released, world.d().quarantined_bytes, set(world.d().peers)) == (True, 0, {"prefill-0"})

    def test_a_rank_of_an_instance_that_serves_or_is_to_be_kept_is_not_forgotten(self) -> None:
        world = served()
        world.kill(RANKS[0])
        assert "p1-prefill-1, which is connected" in asked(world, RANKS[0], of="decode-0").text
        world.kill("prefill-0")
        assert "the agent was told to keep it" in asked(world, "prefill-0", of="decode-0").text


class TestReplacedServers:
    """A server that is started again on its host under another name takes the place of the one before."""

    def hello(self, world: World, name: str, life: int, **changes: Any) -> None:
        who = msgspec.structs.replace(world.d().local.peer_info(), name=name, hostname="node-3", **changes)
        world.feed("prefill-0", ev.Received(name, life, msg.Hello(msg.PROTOCOL_VERSION, who), name.encode()))
        world.feed("prefill-0", ev.PeerConnected(name))
        world.tick(1)

    def silence(self, world: World) -> None:
        for _ in range(LOST_S + 1):
            world.feed("prefill-0", ev.Tick())
            world.now_ns += SECOND

    def test_the_one_before_is_forgotten_as_soon_as_it_is_lost(self) -> None:
        world = World(ParallelConfig(), ParallelConfig())
        self.hello(world, "server-a", 500)
        self.silence(world)
        assert world.p().peers["server-a"].state is PeerState.LOST
        self.hello(world, "server-b", 501)
        assert set(world.p().peers) == {"server-b"}

    def test_also_if_its_successor_was_there_before_the_loss_was_noticed(self) -> None:
        world = World(ParallelConfig(), ParallelConfig())
        self.hello(world, "server-a", 500)
        self.hello(world, "server-b", 501)
        assert set(world.p().peers) == {"server-a", "server-b"}
        for _ in range(LOST_S + 1):
            world.now_ns += SECOND
            world.feed("prefill-0", ev.Received("server-b", 501, msg.Heartbeat(1), b"server-b"))
            world.feed("prefill-0", ev.Tick())
        assert set(world.p().peers) == {"server-b"}

    @pytest.mark.parametrize("changes", [{"hostname": "node-4"}, {"coord": [1, 0, 0, 0], "sizes": [2, 1, 1, 1]}])
    def test_one_on_another_host_or_of_another_rank_takes_no_place(self, changes: dict[str, Any]) -> None:
        world = World(ParallelConfig(), ParallelConfig())
        self.hello(world, "server-a", 500)
        self.silence(world)
        who = msgspec.structs.replace(world.d().local.peer_info(), name="server-b", hostname="node-3")
        who = msgspec.structs.replace(who, **changes)
        if "coord" in changes:
            who = msgspec.structs.replace(who, unique_rank=1)
        world.feed("prefill-0", ev.Received("server-b", 501, msg.Hello(msg.PROTOCOL_VERSION, who), b"b"))
        world.feed("prefill-0", ev.PeerConnected("server-b"))
        world.tick(1)
        assert set(world.p().peers) == {"server-a", "server-b"}

    def test_one_server_takes_the_place_of_one(self) -> None:
        world = World(ParallelConfig(), ParallelConfig())
        self.hello(world, "server-a", 500)
        self.hello(world, "server-b", 501)
        self.silence(world)
        self.hello(world, "server-c", 502)
        assert len(world.p().peers) == 2
        assert world.p().peers["server-c"].replaces in ("server-a", "server-b")

    def test_each_incarnation_takes_the_place_of_one(self) -> None:
        world = World(ParallelConfig(), ParallelConfig())
        self.hello(world, "server-a", 500)
        self.silence(world)
        self.hello(world, "server-b", 501)
        self.hello(world, "server-c", 502)
        assert world.p().peers["server-b"].replaces == "server-a"
        self.silence(world)
        assert world.p().peers["server-c"].state is PeerState.LOST
        self.hello(world, "server-b", 503)
        assert set(world.p().peers) == {"server-b"}
        assert world.p().peers["server-b"].replaces == "server-c"
