"""The ROUTER's end of ZMTP: what a peer may send, in whatever pieces it arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.security import unix_router

MESSAGES = st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=unix_router.MAX_FRAMES), max_size=5)


def greeted(max_bytes: int = 1 << 20) -> unix_router.MessageDecoder:
    decoder = unix_router.MessageDecoder(max_bytes)
    assert decoder.feed(unix_router.OPENING) == []
    assert decoder.identity == b""
    return decoder


@given(MESSAGES, st.integers(1, 700))
def test_messages_survive_however_they_are_cut(messages: list[list[bytes]], step: int) -> None:
    stream = unix_router.OPENING + b"".join(map(unix_router.encode_message, messages))
    decoder = unix_router.MessageDecoder(1 << 20)
    found = [message for at in range(0, len(stream), step) for message in decoder.feed(stream[at : at + step])]
    assert found == messages


def test_a_ping_is_answered_with_its_context() -> None:
    decoder = greeted()
    assert decoder.feed(b"\x04\x0b\x04PING\x00\x01ctxt") == []
    assert decoder.answers == b"\x04\x09\x04PONGctxt"


def test_frames_beyond_those_of_any_protocol_are_dropped() -> None:
    (message,) = greeted().feed(unix_router.encode_message([b"x"] * 50))
    assert message == [b"x"] * unix_router.MAX_FRAMES


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not ZMTP"),
        (b"\xff" * 10 + b"\x01", "older than 3.0"),
        (unix_router.OPENING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32), "mechanism b'CURVE'"),
        (unix_router.OPENING[:64] + unix_router.encode_message([b"hello"]), "before the handshake"),
        (unix_router.OPENING[:64] + unix_router.OPENING[64:].replace(b"ROUTER", b"PUBPUB"), "type b'PUBPUB'"),
        (unix_router.OPENING[:64] + b"\x04\x13\x05READY\x0bSocket-Type\xff", "beyond the end"),
        (unix_router.OPENING + b"\x02" + (1 << 62).to_bytes(8, "big"), "bytes"),
        (unix_router.OPENING + unix_router.encode_message([b"x" * 500, b"y" * 1001]), "a frame of 1001 bytes"),
        (unix_router.OPENING + b"\x80\x00", "flags 0x80"),
        (unix_router.OPENING + b"\x04\x07\x05ERROR\x00", "refuses"),
    ],
)
def test_what_is_not_understood_ends_the_connection(data: bytes, says: str) -> None:
    with pytest.raises(RemoteProtocolError, match=says):
        unix_router.MessageDecoder(1000).feed(data)
