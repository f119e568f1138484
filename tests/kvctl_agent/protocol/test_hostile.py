"""Messages that are valid but hostile: nothing raises, memory stays bounded, other peers are not affected."""

from __future__ import annotations

import random
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import KVGroup, ModelShape, StateShape
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.prefill.admission import MAX_CHUNKS
from kvctl_agent.protocol.tag import TAG_BYTES, PartKey, PartKind, Tag
from tests.support.protocol.moments import connected
from tests.support.protocol.simulation import UNIT, World

# Numbers that are right, nearly right, and at every edge of a field.
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    255,
    UNIT,
    2 * UNIT,
    1000,
    1001,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63,
    2**64 - 1,
    -1,
]
SHAPE = ModelShape(2, 2, 32, 32, 2, states=(StateShape("conv", (0, 1), 3, 1, 16), StateShape("ssm", (1,), 2, 2, 16)))


def world_of(decode: ParallelConfig) -> World:
    """Stages, cp ranks and states, so that all fields of an opening mean something."""
    return World(ParallelConfig(pp=2, cp=2), decode, shape=SHAPE, cp_mode="all-chunk", ring=4)


number = st.sampled_from(NUMBERS)
text = st.sampled_from(["", "prefill", "decode", "room-done", "room-failed", "x" * 300, "\0"])
blob = st.sampled_from([b"", b"\0", b"\1\0\0\0", b"\xff" * 4, b"\0" * 8, b"\0" * 4096])
plan = st.dictionaries(st.sampled_from(["page_size", "plan_version", "prefill.tp", "odd"]), number | text, max_size=3)
lists = st.lists(number, max_size=5)
who = st.builds(
    dict,
    name=text,
    role=text,
    coord=lists,
    sizes=lists,
    unique_rank=number,
    plan=plan,
    pool=st.dictionaries(st.sampled_from(["num_pages", "aux_slots", "slots"]), number | text | lists, max_size=3),
    transport=text,
    metadata=blob,
    host=text,
    pid=number,
    ring_base=number,
    ring_bytes=number,
    stages=lists,
    cp_mode=text | st.sampled_from(CP_MODES),
)
tags = st.builds(
    lambda kind, numbers, key, checksum, row: Tag._make(
        [kind, *(n % 2**64 for n in numbers), PartKey(*key), checksum, row]
    ).pack(),
    st.sampled_from(PartKind),
    st.tuples(number, number, number, number),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 65535)),
    st.none() | st.integers(0, 2**32 - 1),
    st.none() | st.binary(max_size=20),
)
part = st.fixed_dictionaries({"chunk": number, "lo": number, "hi": number, "nbytes": number})
grant = st.fixed_dictionaries(
    {"chunk": number, "lo": number, "hi": number, "serial": number, "offset": number, "end": number, "round": number}
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "who": who,
    "version": number,
    "to": number,
    "differences": st.lists(text, max_size=2),
    "watermark": lists,
    "pages": blob,
    "inputs": plan
    | st.sampled_from([world_of(decode).inputs.to_wire() for decode in (ParallelConfig(), ParallelConfig(dp=2))]),
    "states": st.lists(blob, max_size=4),
    "prefill_only": st.booleans(),
    "drained": st.booleans(),
    "parts": st.lists(part, max_size=3),
    "grants": st.lists(grant, max_size=3),
    "tags": st.lists(tags | blob, max_size=3),
    "code": text,
    "text": text,
    "rank": text,
    "of": text,
    "room": st.sampled_from([7, 8, 2**64 - 1]),
    "nonce": st.sampled_from([0, 1000, 1001, 2**64 - 1]),
}


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """A frame with one message of any type, with any fields; half of them within their bounds, so that they count."""
    kind = draw(st.sampled_from(get_args(msg.AnyMessage)))
    fields = {name: draw(FIELDS.get(name, number)) for name in kind.__struct_fields__}
    if draw(st.booleans()):
        fields = {name: value if name in {"room", "nonce"} else _bounded(value) for name, value in fields.items()}
    body = codec._encoder.encode([{"t": kind.__struct_config__.tag, **fields}])
    return codec.MAGIC + bytes(8) + body


def _bounded(value: Any) -> Any:
    """The nearest that every field of this type takes."""
    match value:
        case bool() | bytes():
            return value
        case int():
            return value % 2**15
        case str():
            return value[:200]
        case list():
            return [_bounded(item) for item in value if not isinstance(item, bytes) or len(item) in {0, TAG_BYTES}][:3]
    return {name: _bounded(item) for name, item in value.items()}


def feed(world: World, to: str, by: str, incarnation: int, frame: bytes) -> None:
    for message in codec.decode(frame)[1]:
        world.feed(to, ev.Received(by, incarnation, message))


@settings(max_examples=100)
@given(frames=st.lists(hostile(), min_size=1, max_size=12), seed=st.integers(0, 1000), stray=st.booleans())
def test_a_peer_may_say_anything(frames: list[bytes], seed: int, stray: bool) -> None:
    """From the real peer's mouth or a stranger's: no exception, and the other dp rank's room is not harmed."""
    world = world_of(ParallelConfig(dp=2))
    world.connect()
    world.receive(8, 3, reader=1, nonce=1001, states=(1, 2))
    world.send(8, 3, states=(1, 2), groups=[1])
    hostile_room = world.receive(7, 3, reader=0, nonce=1000, states=(1, 2))
    dice = random.Random(seed)
    world.stir(dice, dice.randrange(60))
    life = world.d(0).local.incarnation
    for frame in frames:
        feed(world, "prefill-0", "stranger" if stray else "decode-0", life, frame)
    # What the hostile rank is told goes nowhere; the oracle is not asked about its memory.
    world.kill("decode-0")
    del hostile_room
    world.settle()
    assert world.rooms["decode-1", 8, 1001].state is RoomState.SUCCESS


@settings(max_examples=100)
@given(frames=st.lists(hostile(), min_size=1, max_size=12), seed=st.integers(0, 1000))
def test_a_prefill_rank_may_say_anything(frames: list[bytes], seed: int) -> None:
    world = world_of(ParallelConfig())
    world.connect()
    world.receive(7, 3, nonce=1000, states=(1, 2))
    world.send(7, 3, states=(1, 2), groups=[1])
    dice = random.Random(seed)
    world.stir(dice, dice.randrange(60))
    machine = world.d()
    life = machine.peers["prefill-0"].incarnation
    for frame in frames:
        for message in codec.decode(frame)[1]:
            machine.handle(ev.Received("prefill-0", life, message), world.now_ns)
    machine.handle(ev.Tick(), world.now_ns + 1)


def test_tags_of_another_writer_are_not_believed_from_this_one() -> None:
    world = connected(ParallelConfig(tp=2))
    world.receive(7, 2, aux=-1)
    world.flush()
    tag = Tag(PartKind.KV, world.d().local.incarnation, 7, 1000, 0, PartKey(1, 0, 0, 2)).pack()
    world.feed("decode-0", ev.Received("prefill-0", world.p(0).local.incarnation, msg.PartReady(7, 1000, [tag])))
    assert not world.d().rooms[7].landed
    world.feed("decode-0", ev.Received("prefill-1", world.p(1).local.incarnation, msg.PartReady(7, 1000, [tag])))
    assert world.d().rooms[7].landed


def test_a_mismatch_at_open_names_the_factor() -> None:
    world = connected()
    inputs = world.inputs.to_wire() | {"chunk_pages": 64}
    world.feed(
        "prefill-0",
        ev.Received(
            "decode-0",
            world.d().local.incarnation,
            msg.RoomOpen(7, 1, b"", 0, 0, inputs, to=world.p().local.incarnation),
        ),
    )
    answer = codec.decode(world.pool[-1].what)[1][0]
    assert isinstance(answer, msg.RoomRefused)
    assert answer.text == "chunk_pages 2 ≠ 64"


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([b"\0"], "1 bytes of numbers for items of state conv"),
        ([b"", b"\0" * 6], "6 bytes of numbers for items of state ssm"),
        ([b"\xff" * 4], "items of state conv: -1..-1 is outside decode-0's pool of 65536"),
        ([b"\0\0\1\0"], "items of state conv: 65536..65536 is outside decode-0's pool of 65536"),
        ([b""] * 3, "items of 3 state components, the model has 2"),
    ],
)
def test_items_that_cannot_be_are_refused(states: list[bytes], text: str) -> None:
    world = world_of(ParallelConfig())
    world.connect()
    opening = msg.RoomOpen(7, 1, b"", 0, 0, world.inputs.to_wire(), -1, states, to=world.p().local.incarnation)
    world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, opening))
    answer = codec.decode(world.pool[-1].what)[1][0]
    assert isinstance(answer, msg.RoomRefused)
    assert answer.text == text
    assert not world.p().open_rooms


@pytest.mark.parametrize(
    ("groups", "tokens", "text"),
    [
        ([b"\0"], 8, "1 bytes of numbers for pages of group swa"),
        ([b"\xff" * 4], 8, "pages of group swa: -1..-1 is outside decode-0's pool of 65536"),
        ([b"\0\0\1\0"], 8, "pages of group swa: 65536..65536 is outside decode-0's pool of 65536"),
        ([b"", b""], 8, "pages of 2 KV groups, the model has 1"),
        ([b"\0" * 8], 2, "2 pages of group swa are more than 1"),
        ([b"\0" * 4], 0, "1 pages of group swa are more than 0"),
        ([b"\0" * 4 * (MAX_CHUNKS + 1)], 1 << 30, f"{MAX_CHUNKS + 1} pages of group swa are more than {MAX_CHUNKS}"),
    ],
)
def test_pages_of_groups_that_cannot_be_are_refused(groups: list[bytes], tokens: int, text: str) -> None:
    shape = ModelShape(2, 2, 4, 4, 2, groups=(KVGroup("swa", ModelShape(1, 2, 4, 4, 2), (0,), 2),))
    world = connected(shape=shape, chunk_pages=2, num_pages=1 << 16)
    inputs = world.inputs.to_wire()
    to = world.p().local.incarnation
    opening = msg.RoomOpen(7, 1, b"", 0, 0, inputs, to=to, groups=groups, tokens=tokens)
    world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, opening))
    answer = codec.decode(world.pool[-1].what)[1][0]
    assert isinstance(answer, msg.RoomRefused)
    assert answer.text == text
    assert not world.p().open_rooms


@pytest.mark.parametrize("page", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("num_pages", [64, 2**31 - 1, 2**40])
def test_pages_outside_any_pool_are_refused(page: int, num_pages: int) -> None:
    world = World(ParallelConfig(), num_pages=num_pages)
    world.connect()
    pages = page.to_bytes(4, "little", signed=True)
    opening = msg.RoomOpen(7, 1, pages, 0, 1, world.inputs.to_wire(), -1, [], to=world.p().local.incarnation)
    world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, opening))
    answer = codec.decode(world.pool[-1].what)[1][0]
    if page < 0 or page >= num_pages:
        assert isinstance(answer, msg.RoomRefused)
        assert answer.text == f"pages 0..1: {page}..{page} is outside decode-0's pool of {num_pages}"
    else:
        assert isinstance(answer, msg.RoomAccepted)


def test_an_opening_may_not_want_more_pages_than_a_prompt_can_have() -> None:
    world = world_of(ParallelConfig())
    world.connect()
    for prefix, total in [(5, 4), (0, 2**31 - 1)]:
        opening = msg.RoomOpen(
            7, total, b"", prefix, total, world.inputs.to_wire(), -1, [], True, world.p().local.incarnation
        )
        world.feed("prefill-0", ev.Received("decode-0", world.d().local.incarnation, opening))
        assert isinstance(codec.decode(world.pool[-1].what)[1][0], msg.RoomRefused)
    assert not world.p().open_rooms
