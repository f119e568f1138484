"""Frames and tags: no input raises more than RemoteProtocolError; a malformed message does not affect its frame."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.tag import CHECKSUM_BYTES, MAX_ROW_BYTES, TAG_BYTES, PartKey, PartKind, Tag
from kvctl_agent.transport.base import MAX_TAG_BYTES
from tests.support.protocol.example_messages import EVERY, TAG, WHO


def raw(*messages: Any) -> bytes:
    return codec.MAGIC + (7).to_bytes(8, "little") + msgspec.msgpack.encode(list(messages))


def test_every_message_survives_the_round_trip() -> None:
    assert {type(message) for message in EVERY} == set(get_args(msg.AnyMessage))
    assert codec.decode(codec.encode(2**64 - 1, EVERY)) == (2**64 - 1, EVERY, 0)


def test_an_unknown_field_is_ignored_so_that_additions_are_possible() -> None:
    frame = raw({"t": "room-done", "room": 1, "nonce": 2, "mood": "fine"})
    assert codec.decode(frame) == (7, [msg.RoomDone(1, 2)], 0)


@pytest.mark.parametrize(
    "bad",
    [
        {"t": "no-such-message"},
        {"t": "room-done", "room": 1},
        {"t": "room-done", "room": -1, "nonce": 2},
        {"t": "room-done", "room": "1", "nonce": 2},
        {"t": "room-open", "room": 1, "nonce": 2, "pages": b"", "prefix_pages": -1, "total_pages": 0, "inputs": {}},
        {"t": "room-open", "room": 1, "nonce": 2, "pages": b"", "prefix_pages": 0, "total_pages": 2**31, "inputs": {}},
        {
            "t": "room-open",
            "room": 1,
            "nonce": 2,
            "pages": b"",
            "prefix_pages": 0,
            "total_pages": 0,
            "inputs": {},
            "states": [b""] * 65,
        },
        {"t": "staging-request", "room": 1, "nonce": 2, "parts": [{"chunk": 0, "lo": 0, "hi": 65536, "nbytes": 1}]},
        {"t": "staging-request", "room": 1, "nonce": 2, "parts": [{"chunk": 0, "lo": -1, "hi": 1, "nbytes": 1}]},
        {"t": "heartbeat", "sent_ns": 1, "watermark": [1, 2, 3, 4]},
        {"t": "room-failed", "room": 1, "nonce": 2, "rank": "d", "code": "C", "at_ns": 1, "text": "x" * 5000},
        ["room-done", 1, 2],
        None,
        {},
    ],
)
def test_one_bad_message_spoils_only_itself(bad: Any) -> None:
    good = {"t": "room-done", "room": 1, "nonce": 2}
    assert codec.decode(raw(good, bad, good)) == (7, [msg.RoomDone(1, 2)] * 2, 1)


def test_another_version_is_refused_with_both_numbers() -> None:
    frame = bytearray(codec.encode(7, EVERY))
    frame[4] = PROTOCOL_VERSION + 1
    with pytest.raises(RemoteProtocolError, match=f"version {PROTOCOL_VERSION + 1} ≠ {PROTOCOL_VERSION}"):
        codec.decode(bytes(frame))


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds the limit"):
        codec.decode(bytes(codec.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\xc0" * (1 << 20),
        msgspec.msgpack.encode([{"t": "bye", "drained": True}] * (codec.MAX_MESSAGES + 1)),
    ],
    ids=["nothings", "messages"],
)
def test_a_frame_of_countless_messages_is_refused_before_one_is_made(body: bytes) -> None:
    frame = codec.MAGIC + bytes(8) + body
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="not a list of messages"):
            codec.decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("tags", [[b""] * 1000, [b"x" * 31], [b"x" * 4097], [TAG] * ((1 << 18) + 1)])
def test_lists_and_sizes_of_tags_are_bounded(tags: list[bytes]) -> None:
    assert codec.decode(raw({"t": "part-ready", "room": 1, "nonce": 2, "tags": tags})) == (7, [], 1)


@given(st.binary(max_size=200))
@example(b"")
@example(codec.MAGIC)
@example(codec.MAGIC + bytes(8))
@example(codec.MAGIC + bytes(8) + b"\xdd\xff\xff\xff\xff")
@example(codec.MAGIC + bytes(8) + b"\x91" * 5000)
@example(codec.MAGIC + bytes(8) + b"\x91\xdb\xff\xff\xff\xff")
def test_random_bytes_raise_nothing_but_remote_protocol_error(data: bytes) -> None:
    for frame in (data, codec.MAGIC + bytes(8) + data):
        with contextlib.suppress(RemoteProtocolError):
            codec.decode(frame)


@given(st.sampled_from(EVERY), st.data())
def test_a_frame_with_flipped_bytes_raises_nothing_else(message: msg.Message, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(7, [message, msg.RoomDone(1, 2)]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        codec.decode(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


u64 = st.integers(0, 2**64 - 1)
keys = st.builds(PartKey, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 65534), st.just(65535))


checksums = st.none() | st.integers(0, 2**32 - 1)


@given(st.builds(Tag, st.sampled_from(PartKind), u64, u64, u64, u64, keys, checksums, st.none()))
def test_a_tag_survives_the_round_trip(tag: Tag) -> None:
    assert Tag.unpack(tag.pack()) == tag
    assert len(tag.pack()) == TAG_BYTES + (0 if tag.checksum is None else CHECKSUM_BYTES)


@given(st.builds(Tag, st.just(PartKind.AUX), u64, u64, u64, u64, keys, st.none(), st.binary(min_size=1)))
def test_a_tag_with_its_aux_row_survives_the_round_trip(tag: Tag) -> None:
    assert Tag.unpack(tag.pack()) == tag


def test_a_tag_with_the_largest_row_can_be_sent_again() -> None:
    tag = Tag(PartKind.AUX, 1, 2, 3, 0, PartKey(0, 0, 0, 0), row=bytes(MAX_ROW_BYTES)).pack()
    assert len(tag) <= MAX_TAG_BYTES
    again = msg.PartReady(2, 3, [tag])
    assert codec.decode(codec.encode(1, [again])) == (1, [again], 0)


def test_a_tag_of_a_state_carries_no_row() -> None:
    with pytest.raises(RemoteProtocolError, match="tag of unknown kind"):
        Tag.unpack(Tag(PartKind.STATE, 1, 2, 3, 0, PartKey(0, 0, 0, 2), row=b"row").pack())


@given(st.one_of(st.binary(max_size=80), st.binary(min_size=TAG_BYTES, max_size=TAG_BYTES)))
def test_random_bytes_are_a_tag_or_a_remote_protocol_error(data: bytes) -> None:
    for candidate in (data, b"\xc7" + data[1:], b"\xc8" + data[1:]):
        with contextlib.suppress(RemoteProtocolError):
            assert Tag.unpack(candidate).pack() == candidate


def test_a_tag_without_layers_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"empty layer range \[3, 3\)"):
        Tag.unpack(Tag(PartKind.KV, 1, 1, 1, 0, PartKey(0, 0, 3, 3)).pack())


@pytest.mark.parametrize(
    "shared", [[WHO.shared[0]] * (msg.MAX_SHARED + 1), [msgspec.structs.replace(WHO.shared[0], addr=2**62)]]
)
def test_memory_that_no_arithmetic_could_bear_spoils_its_hello(shared: list[msg.SharedMemory]) -> None:
    frame = codec.encode(1, [msg.Hello(PROTOCOL_VERSION, msgspec.structs.replace(WHO, shared=shared)), msg.Bye(True)])
    assert codec.decode(frame) == (1, [msg.Bye(True)], 1)
