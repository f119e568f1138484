"""Peers that fall silent, come back, end, or have another layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import KVGroup, ModelShape, StateShape, segments
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.peer import Peer, PeerState, plan_with_peer
from kvctl_agent.protocol.prefill.admission import MAX_PEERS
from tests.support.folded import folded
from tests.support.protocol.moments import connected, in_flight, pass_time, silence
from tests.support.protocol.simulation import MS, SECOND, SHAPE, TIMING, World, direct, registry

VERSION = msg.PROTOCOL_VERSION


class TestStates:
    def peer(self) -> Peer:
        peer = Peer("decode-0", TIMING)
        peer.state = PeerState.READY
        peer.heard_ns = 0
        return peer

    def test_silence_makes_suspect_and_then_lost(self) -> None:
        peer = self.peer()
        assert peer.check(TIMING.suspect_ns - 1) is None
        assert peer.check(TIMING.suspect_ns) is PeerState.SUSPECT
        assert peer.check(TIMING.suspect_ns) is None
        assert peer.check(TIMING.lost_ns) is PeerState.LOST
        assert peer.check(2 * TIMING.lost_ns) is None

    def test_anything_heard_ends_a_suspicion(self) -> None:
        peer = self.peer()
        peer.check(TIMING.suspect_ns)
        assert peer.hear(TIMING.suspect_ns) == (True, True), "its lease had run out, and it was suspect"
        assert peer.hear(TIMING.suspect_ns) == (False, False)
        assert peer.state is PeerState.READY

    def test_while_it_could_not_be_heard_it_was_not_silent(self) -> None:
        peer = self.peer()
        now_ns = TIMING.lost_ns + SECOND
        peer.discount(TIMING.lost_ns, now_ns)
        assert peer.check(now_ns) is None
        assert not peer.may_post(now_ns), "nobody knows what it has done meanwhile"
        assert peer.check(now_ns + TIMING.suspect_ns) is PeerState.SUSPECT
        peer.discount(TIMING.lost_ns, now_ns + TIMING.lost_ns)  # held up again, and has read nothing from it between
        assert peer.check(now_ns + TIMING.lost_ns) is PeerState.LOST

    def test_what_was_heard_after_all_is_where_its_silence_begins(self) -> None:
        peer = self.peer()
        now_ns = 2 * TIMING.lost_ns
        peer.hear(now_ns)
        peer.discount(2 * TIMING.lost_ns, now_ns)
        assert peer.check(now_ns + TIMING.lost_ns) is PeerState.LOST
        peer = self.peer()
        peer.discount(TIMING.lost_ns, now_ns)
        peer.hear(now_ns)
        assert peer.check(now_ns + TIMING.lost_ns) is PeerState.LOST

    def test_the_lease_ends_after_half_the_suspect_time(self) -> None:
        peer = self.peer()
        assert peer.may_post(TIMING.suspect_ns // 2)
        assert not peer.may_post(TIMING.suspect_ns // 2 + 1)
        assert peer.state is PeerState.READY

    def test_round_trips_come_from_echoes(self) -> None:
        peer = self.peer()
        peer.heartbeat(msg.Heartbeat(sent_ns=5, echo_ns=100, held_ns=30), 150)
        assert peer.rtt_ns == 20
        peer.heartbeat(msg.Heartbeat(sent_ns=6, echo_ns=1 << 60, held_ns=0), 160)
        assert peer.rtt_ns == 20, "nonsense changes nothing"
        beat = peer.due_heartbeat(170, [])
        assert beat is not None
        assert (beat.echo_ns, beat.held_ns) == (6, 10)
        assert peer.due_heartbeat(171, []) is None


def test_a_parked_part_goes_on_when_a_hello_is_what_renews_the_lease() -> None:
    """Found by a random history: decode, which suspected us, says Hello before anything else."""
    world = connected(choose=direct)
    room = world.receive(7, 2)
    world.flush()
    world.now_ns += TIMING.lease_ns + MS
    world.send(7, 2)
    world.flush()
    assert len(world.p().parked()) == 1
    hello = msg.Hello(VERSION, world.d().local.peer_info())
    world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, hello))
    assert world.p().parked() == []
    world.flush()
    assert room.state is RoomState.SUCCESS


def stood(world: World, stood_ns: int) -> None:
    world.now_ns += stood_ns
    for name in world.machines:
        world.feed(name, ev.Tick(stood_ns))


def test_ranks_that_stood_still_together_lose_nobody() -> None:
    world = in_flight()
    stood(world, 2 * TIMING.lost_ns)
    world.settle()
    assert world.rooms["decode-0", 7, 1000].state is RoomState.SUCCESS
    assert {peer.state for machine in world.machines.values() for peer in machine.peers.values()} == {PeerState.READY}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("claimed", [True, False])
def test_time_in_which_a_rank_could_not_run_counts_for_no_deadline_of_a_room(claimed: bool, opened: bool) -> None:
    world = connected(ParallelConfig(), ParallelConfig(tp=1 if opened else 2))
    world.receive(7, 2)
    if claimed:
        world.feed("prefill-0", ev.SendRoom(7))
    world.flush()
    stood(world, 2 * max(TIMING.bootstrap_ns, TIMING.waiting_ns, TIMING.unclaimed_ns))
    world.flush()
    world.tick(SECOND)
    (room,) = world.rooms.values()
    assert not room.state.finished
    assert world.p().rooms[7].failure is None
    silence(world, "", max(TIMING.bootstrap_ns, TIMING.waiting_ns) // SECOND + 5)
    assert room.state is RoomState.FAILED, "the time in which they run counts"


def test_a_tag_of_a_quarantined_region_ends_its_quarantine() -> None:
    world = in_flight()
    world.paused.add("prefill-0")
    pass_time(world, 20)
    held = world.d().state.grant_table.quarantined_bytes
    assert held
    complete = next(item for item in world.pool if item.kind == "complete" and item.to == "prefill-0")
    world.pool.remove(complete)
    world.happen(complete)
    world.flush()
    assert world.d().state.grant_table.quarantined_bytes < held
    world.paused.clear()
    world.settle()
    world.check_empty()


def test_a_rank_that_gave_rooms_up_is_asked_about_them_until_it_answers() -> None:
    world = connected()
    room = world.receive(7, 2)
    world.flush()
    world.p().peers["decode-0"].heard_ns -= TIMING.lost_ns
    world.feed("prefill-0", ev.Tick())
    to_lose: set[type] = {msg.HelloAck, msg.RoomOpen}
    for _ in range(20):
        world.tick(SECOND)
        while places := world.ready():
            item = world.pool.pop(places[0])
            kind = type(codec.decode(item.what)[1][0]) if item.kind == "message" else None
            if kind in to_lose:
                to_lose.discard(kind)
            else:
                world.happen(item)
    assert not to_lose
    assert room.state is RoomState.FAILED
    assert room.released


def test_what_comes_late_from_an_old_life_does_not_bring_it_back() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    old = {item.to: item for item in world.pool if item.kind == "message"}["prefill-0"]
    world.connect()
    answer = msg.HelloAck(VERSION, world.p().local.peer_info(), world.d().local.incarnation)
    first = world.p().local.incarnation
    world.restart("prefill-0", proven=False)
    pass_time(world, 6)
    second = world.p().local.incarnation
    world.feed("decode-0", ev.Received("prefill-0", first, answer))
    assert world.d().peers["prefill-0"].incarnation == second
    world.restart("decode-0", proven=False)
    world.prove()
    world.flush()
    world.happen(old)
    assert world.p().peers["decode-0"].incarnation == world.d().local.incarnation


def test_an_answer_to_the_hello_of_a_life_before_is_no_answer() -> None:
    """Else decode would take for ready a rank that has not met it."""
    world = World(ParallelConfig(), ParallelConfig())
    stale = msg.HelloAck(VERSION, world.p().local.peer_info(), world.d().local.incarnation)
    world.restart("decode-0", proven=False)
    world.feed("decode-0", ev.Received("prefill-0", world.p().local.incarnation, stale))
    assert world.d().peers["prefill-0"].state is PeerState.CONNECTING
    world.connect()
    assert world.d().peers["prefill-0"].state is PeerState.READY


def test_hellos_while_the_transport_connects_connect_once() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    hello = next(item for item in world.pool if item.to == "prefill-0")
    for _ in range(3):
        world.happen(hello)
    assert len([item for item in world.pool if item.kind == "event"]) == 1


def test_a_transport_that_cannot_reach_decode_is_told_to_it() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    room = world.receive(7, 2)
    hello = next(item for item in world.pool if item.to == "prefill-0")
    world.pool.clear()
    world.happen(hello)
    world.pool.clear()
    world.feed("prefill-0", ev.PeerUnusable("decode-0", "no connection to it"))
    world.flush()
    assert room.failure["code"] == "KV_COMPAT_MISMATCH"
    assert "prefill-0 refused: no connection to it" in room.failure["text"]


def test_a_rank_whose_control_socket_is_refused_fails_its_rooms_until_it_can_be_connected_to() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    room = world.receive(7, 2)
    world.pool.clear()
    for _ in range(2):
        world.feed("decode-0", ev.PeerUnusable("prefill-0", "uid 9 listens on /r"))
    peer = world.d().peers["prefill-0"]
    assert peer.state is PeerState.REFUSED
    assert peer.errors_total == 1
    assert room.failure["code"] == "KV_COMPAT_MISMATCH"
    assert room.failure["text"] == "prefill-0 refused: uid 9 listens on /r"
    for _ in range(20):  # the right process listens now
        world.tick(SECOND)
        world.flush()
    assert peer.state is PeerState.READY
    world.feed("decode-0", ev.PeerUnusable("prefill-0", "uid 9 listens on /r"))
    assert peer.state is PeerState.READY


def mismatched(**changes: object) -> World:
    """A decode rank that differs from its prefill instance."""
    world = World(ParallelConfig(tp=2), ParallelConfig())
    local = world.d().local
    fields = {name: getattr(local, name) for name in local.__struct_fields__} | changes
    world.machines["decode-0"] = world._machine(type(local)(**fields))
    world.pool.clear()
    world.feed("decode-0", ev.RosterKnown(registry(0), world.prefill_names))
    return world


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"transport": "mooncake"}, "transport simulated ≠ mooncake"),
        ({"shape": ModelShape(3, 2, 32, 32, 2)}, "shape.num_layers 2 ≠ 3"),
        ({"pool": {}}, "its pool does not say num_pages"),
        ({"pool": {"num_pages": [1], "aux_slots": 1}}, "its pool does not say num_pages"),
        ({"pool": {"num_pages": 1, "aux_slots": -1}}, "its pool does not say aux_slots"),
        ({"pool": {"num_pages": 1, "aux_slots": 1}}, "its pool does not say slots"),
        ({"pool": {"num_pages": 1, "aux_slots": 1, "slots": []}}, "its pool does not say slots"),
        ({"pool": {"num_pages": 1, "aux_slots": 1, "slots": [1, 1]}}, "its pool does not say slots"),
        ({"pool": {"num_pages": 1, "aux_slots": 1, "slots": [-1]}}, "its pool does not say slots"),
        ({"shape": replace(SHAPE, k_scale_bytes=4)}, "shape.k_scale_bytes 0 ≠ 4"),
        ({"shape": replace(SHAPE, draft=SHAPE)}, "draft.num_layers absent ≠ 2"),
        (
            {"shape": replace(SHAPE, states=(StateShape("ssm", (0,), 1, 2, 8),))},
            "state.ssm absent ≠ 1x2x8 bytes beside layers 0",
        ),
    ],
)
def test_a_mismatch_is_refused_at_hello_and_names_the_factor(changes: dict[str, object], factor: str) -> None:
    world = mismatched(**changes)
    world.rooms.clear()
    room = world.receive(7, 2)
    world.flush()
    assert room.failure["code"] == "KV_COMPAT_MISMATCH"
    assert factor in room.failure["text"]
    later = world.receive(8, 2)
    assert later.state is RoomState.FAILED, "nor does a later room wait for what cannot be"


def test_a_refused_rank_fails_the_rooms_of_its_own_dp_group_only() -> None:
    world = connected(ParallelConfig(dp=2))
    successor = msg.HelloAck(VERSION, world.p(1).local.peer_info(), world.d().local.incarnation, ["dtype fp8 ≠ bf16"])
    world.machines.pop("prefill-1")
    world.feed("decode-0", ev.PeerDead("prefill-1", world.d().peers["prefill-1"].incarnation, "its process has ended"))
    waiting = {number: world.receive(number, 2) for number in (10, 11)}  # a room's number chooses its dp group
    assert waiting[11].state is RoomState.BOOTSTRAPPING
    world.feed("decode-0", ev.Received("prefill-1", 99, successor))
    later = {number: world.receive(number, 2) for number in (12, 13)}
    for room in (waiting[11], later[13]):
        assert room.failure["code"] == "KV_COMPAT_MISMATCH"
        assert "dtype fp8 ≠ bf16" in room.failure["text"]
    for number in (10, 12):
        world.send(number, 2)
    world.flush()
    assert waiting[10].state is later[12].state is RoomState.SUCCESS


HEADS_8 = ModelShape(6, 8, 32, 32, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sizes": [1, 1, 1, 3]}, "decode tp=3: 8 KV heads cannot be laid out over tp 3: 8 % 3 = 2 and 3 % 8 = 3"),
        ({"sizes": [1, 2, 1, 1], "stages": [1, 4]}, "decode pp=2: pipeline stages have 1+4 = 5 layers"),
        ({"sizes": [1, 2, 1, 1], "stages": [1, 2, 3]}, "stages=1,2,3 has 3 stages, but pp=2"),
        ({"sizes": [1, 2, 1, 1], "stages": [6, 0]}, "layers of a stage is 0"),
        ({"sizes": [1, 7, 1, 1]}, "decode pp=7: 6 layers cannot be divided into pp=7 stages: one would be empty"),
        ({"sizes": [1, 1, 2, 1], "cp_interleave": 3}, "cp_interleave 3: it must divide the decode page of 1 tokens"),
        ({"sizes": [1, 1, 1]}, "sizes and coordinates need the four axes dp, pp, cp, tp"),
        ({"sizes": [2, 1, 1, 1], "unique_rank": 1}, "unique rank 1 does not fit coordinates [0, 0, 0, 0]"),
        ({"role": "prefill"}, "role prefill fits no prefill"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_at_hello_with_the_arithmetic(
    changes: dict[str, object], text: str
) -> None:
    world = World(ParallelConfig(), ParallelConfig(), shape=HEADS_8)
    who = msgspec.structs.replace(world.d().local.peer_info(), **changes)
    world.pool.clear()
    world.feed("prefill-0", ev.Received("decode-0", 77, msg.Hello(VERSION, who)))
    answer = codec.decode(world.pool[0].what)[1][0]
    assert isinstance(answer, msg.HelloAck)
    assert len(answer.differences) == 1
    assert text in answer.differences[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cp_mode": "odd"}, "cp_mode 'odd' is unknown: it must be one of rank0, all, all-chunk, room-hash"),
        ({"cp_mode": "x" * 256}, "is unknown: it must be one of"),
        ({"stages": [5]}, "prefill pp=1: pipeline stages have 5 = 5 layers, but the model has 6"),
        ({"sizes": [1, 1, 1, 3]}, "prefill tp=3: 8 KV heads cannot be laid out over tp 3"),
    ],
)
def test_a_prefill_rank_that_cannot_work_is_refused_by_decode(changes: dict[str, object], text: str) -> None:
    world = World(ParallelConfig(), ParallelConfig(), shape=HEADS_8)
    room = world.receive(7, 2)
    who = msgspec.structs.replace(world.p().local.peer_info(), **changes)
    world.feed("decode-0", ev.Received("prefill-0", 77, msg.HelloAck(VERSION, who, world.d().local.incarnation)))
    assert room.failure["code"] == "KV_COMPAT_MISMATCH"
    assert text in room.failure["text"]


def test_a_decode_rank_uses_the_chunk_grid_of_each_prefill_instance() -> None:
    world = mismatched(chunk_pages=64)
    world.flush()
    assert world.chunk_pages == 2
    assert world.d().peers["prefill-0"].inputs.chunk_pages == world.p().peers["decode-0"].inputs.chunk_pages == 2
    room = world.receive(7, 5)
    world.send(7, 5)
    world.settle(ticks=1)
    assert room.state is RoomState.SUCCESS
    assert sum(world.paths.values()) == 2 * 3, "two writers with three chunks each"


@pytest.mark.parametrize("chunk", [0, -2, "2", 3])
def test_a_chunk_grid_that_is_none_is_refused(chunk: object) -> None:
    world = World(ParallelConfig(), ParallelConfig())
    who = world.p().local.peer_info()
    plan = who.plan | {"page_size": 2, "chunk_tokens": chunk}
    info = msgspec.structs.replace(who, plan=plan)
    found = plan_with_peer(msgspec.structs.replace(world.d().local, page_size=2), info)
    assert found.inputs is None
    assert found.differences == (f"its chunk_tokens is {chunk!r}, with pages of 2 tokens",)


def test_a_refused_peer_is_asked_again_so_that_its_restart_is_seen() -> None:
    world = mismatched(shape=ModelShape(3, 2, 32, 32, 2))
    world.flush()
    assert world.d().peers["prefill-0"].state is PeerState.REFUSED
    before = folded(world.d().telemetry).recorder.since(None, 100)["next"]
    pass_time(world, 10)
    assert folded(world.d().telemetry).recorder.since(None, 100)["next"] == before, "the same refusal is noted once"
    for name in world.prefill_names:
        world.shape = ModelShape(3, 2, 32, 32, 2)
        world.restart(name, proven=False)
    pass_time(world, 5)
    assert world.d().missing_peers == []


def test_another_version_is_refused_with_both_numbers() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    hello = msg.Hello(9, world.d().local.peer_info())
    world.pool.clear()
    world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, hello))
    answer = codec.decode(world.pool[0].what)[1][0]
    assert isinstance(answer, msg.HelloAck)
    assert answer.differences == [f"protocol version {VERSION} ≠ 9"]


def test_a_rank_that_does_not_fit_the_roster_waits_for_the_registry_to_agree() -> None:
    """A restart with another layout: hello comes first, and no room fails for that."""
    world = World(ParallelConfig(tp=2), ParallelConfig())
    me = world.d().local.incarnation
    wrong = world.p(1).local.peer_info()
    world.feed("decode-0", ev.Received("prefill-0", 77, msg.HelloAck(VERSION, wrong, me)))
    peer = world.d().peers["prefill-0"]
    assert peer.differences == ("it says that it is rank 1, the roster says otherwise",)
    right = World(ParallelConfig(), ParallelConfig()).p(0).local.peer_info()
    for _ in range(2):
        world.feed("decode-0", ev.Received("prefill-0", 78, msg.HelloAck(VERSION, right, me)))
    assert peer.differences == ("2 ranks on the roster ≠ 1 by its sizes",)
    assert peer.state is PeerState.CONNECTING
    notes = [row["text"] for row in folded(world.d().telemetry).recorder.since(None, 100)["events"]]
    assert sum("≠ 1 by its sizes" in text for text in notes) == 1, "told once, however often it says so"
    room = world.receive(7, 2)
    assert room.state is RoomState.BOOTSTRAPPING
    world.feed("decode-0", ev.RosterKnown(registry(0), ("prefill-0",)))
    world.feed("decode-0", ev.Received("prefill-0", 78, msg.HelloAck(VERSION, right, me)))
    assert peer.state is PeerState.READY
    assert world.d().rooms[7].transfers


def test_a_life_that_was_never_met_is_no_end_of_a_later_one() -> None:
    """Its answer was on its way for long; to take it for a return would free what the living one may still write."""
    world = connected()
    peer, me = world.d().peers["prefill-0"], world.d().local.incarnation
    world.restart("prefill-0")
    world.settle(ticks=5, until=lambda: peer.usable)
    met = peer.incarnation
    peer.ended_incarnations.clear()
    world.feed("decode-0", ev.Received("prefill-0", 1, msg.HelloAck(VERSION, world.p().local.peer_info(), me)))
    assert (peer.incarnation, peer.state) == (met, PeerState.READY)


def test_a_registry_that_never_agrees_is_named_at_the_deadline() -> None:
    world = World(ParallelConfig(tp=2), ParallelConfig())
    world.pool.clear()
    room = world.receive(7, 2)
    wrong = world.p(1).local.peer_info()
    world.feed("decode-0", ev.Received("prefill-0", 77, msg.HelloAck(VERSION, wrong, world.d().local.incarnation)))
    world.now_ns += TIMING.bootstrap_ns + SECOND
    world.feed("decode-0", ev.Tick())
    assert room.failure["text"].endswith(
        "not accepted by prefill-0 (it says that it is rank 1, the roster says otherwise), prefill-1"
    )


def test_peers_that_nobody_needs_do_not_grow_without_bound() -> None:
    world = connected()
    who = world.d().local.peer_info()
    for number in range(MAX_PEERS + 10):
        world.feed("prefill-0", ev.Received(f"stranger-{number}", 500, msg.Hello(9, who)))
        world.pool.clear()
    assert len(world.p().peers) <= MAX_PEERS
    assert world.p().peers["decode-0"].state is PeerState.READY


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"draft": SHAPE}, "a draft model"),
        ({"states": (StateShape("ssm", (0,), 1, 2, 8),)}, "state ssm"),
        ({"groups": (KVGroup("window", replace(SHAPE, num_layers=1), (0,), 1),)}, "group window"),
        ({"dtype_bytes": 1}, "quantised KV"),
    ],
)
def test_two_engines_share_plain_kv_only(changes: dict[str, Any], text: str) -> None:
    world = World(ParallelConfig(), ParallelConfig())
    prefill, decode = (
        msgspec.structs.replace(
            agent.local,
            engine=engine,
            shape=replace(SHAPE, **changes),
            pool={**agent.local.pool, "slots": [1] * len(segments(replace(SHAPE, **changes), 4))},
        )
        for agent, engine in ((world.p(), "sglang"), (world.d(), "vllm"))
    )
    refusal = f"engine vllm ≠ sglang, between which only plain KV can be transferred: {text}"
    assert plan_with_peer(decode, prefill.peer_info()).differences == ((refusal,) if text else ())
    assert (plan_with_peer(prefill, decode.peer_info()).inputs is None) == bool(text)
    same = msgspec.structs.replace(decode, engine="sglang")
    assert plan_with_peer(prefill, same.peer_info()).differences == ()


@pytest.mark.parametrize(
    ("sent", "taken", "fits"),
    [("a", "a", True), ("a", "b, a", True), ("a", "b", False), ("b, a", "a", False), ("b, a", "b", True)],
)
@pytest.mark.parametrize("segment", ["kv", "draft", "kv k_scale", "ssm"])
def test_the_dtype_of_prefill_is_one_that_decode_receives(sent: str, taken: str, fits: bool, segment: str) -> None:
    world = World(ParallelConfig(), ParallelConfig())
    prefill = msgspec.structs.replace(world.p().local, dtypes={segment: sent, "a": "x"})
    decode = msgspec.structs.replace(world.d().local, dtypes={segment: taken, "b": "y"})
    for local, remote, both in ((prefill, decode, f"{sent} ≠ {taken}"), (decode, prefill, f"{taken} ≠ {sent}")):
        differences = plan_with_peer(local, remote.peer_info()).differences
        assert differences == (() if fits else (f"{segment} dtype {both}",))


@pytest.mark.parametrize(("known", "fits"), [("bfloat16", True), ("float16", False)])
def test_an_engine_before_there_were_dtypes_is_compared_too(known: str, fits: bool) -> None:
    world = World(ParallelConfig(), ParallelConfig())
    decode = msgspec.structs.replace(world.d().local, dtypes={"kv": "bfloat16"})
    info = world.p().local.peer_info()
    before = msgspec.structs.replace(info, plan={**info.plan, "kv_format": known})
    assert plan_with_peer(decode, before).differences == (() if fits else ("kv dtype bfloat16 ≠ float16",))


def test_a_dtype_that_one_side_does_not_know_is_compared_with_nothing() -> None:
    world = World(ParallelConfig(), ParallelConfig())
    prefill = msgspec.structs.replace(world.p().local, dtypes={"kv": "float16", "draft": "bfloat16"})
    assert plan_with_peer(prefill, world.d().local.peer_info()).inputs is not None
    assert plan_with_peer(world.d().local, prefill.peer_info()).inputs is not None
