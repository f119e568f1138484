"""The connection for tags delivers every byte string in order, however TCP divides the stream."""

from __future__ import annotations

import socket
import time
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.transport.base import MAX_TAG_BYTES
from kvctl_agent.transport.mooncake import tags

SECRET = b"s" * tags.SECRET_BYTES
IDENT = "i" * tags.IDENT_BYTES


def frame(tag: bytes) -> bytes:
    return len(tag).to_bytes(4, "little") + tag


@given(st.text(max_size=256), st.lists(st.binary(min_size=1, max_size=MAX_TAG_BYTES), max_size=8), st.data())
def test_a_stream_cut_anywhere_yields_the_same_tags(name: str, sent: list[bytes], data: st.DataObject) -> None:
    stream = tags.greeting(SECRET, IDENT, name) + b"".join(map(frame, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    with socket.socket() as unused:
        sender = tags.Sender(unused)
        seen: list[bytes] = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            seen += sender.take(SECRET, stream[start:end])
    assert seen == sent
    assert (sender.ident, sender.name) == (IDENT, name)


@given(st.binary(max_size=3000))
def test_what_is_no_greeting_is_refused_or_waits_but_yields_nothing(junk: bytes) -> None:
    with socket.socket() as unused:
        sender = tags.Sender(unused)
        try:
            assert sender.take(SECRET, junk) == []
        except ValueError:
            return
        assert len(sender._pending) < 2048


@pytest.mark.parametrize("nbytes", [0, MAX_TAG_BYTES + 1, 2**32 - 1])
def test_a_tag_of_impossible_length_ends_the_connection(nbytes: int) -> None:
    with socket.socket() as unused:
        sender = tags.Sender(unused)
        with pytest.raises(ValueError, match=f"a tag of {nbytes} bytes"):
            sender.take(SECRET, tags.greeting(SECRET, IDENT, "n") + nbytes.to_bytes(4, "little"))


def test_tags_wait_while_the_reader_does_not_collect_and_there_is_an_end_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "_OUTBOX_MAX_BYTES", 1 << 20)
    listener = tags.TagListener("127.0.0.1")
    link = tags.TagLink("peer 'p'", ("127.0.0.1", listener.port), tags.greeting(listener.secret, IDENT, "w"))
    sent = 0

    def tell_many() -> None:
        nonlocal sent
        for sent in range(100_000):
            link.enqueue(b"%06d" % sent + bytes(4000))

    with pytest.raises(TransportError, match=r"peer 'p' leaves .* bytes of tags uncollected"):
        tell_many()
    landed: deque[tuple[tags.Sender, bytes]] = deque()
    until = time.monotonic() + 60
    while len(landed) < sent and time.monotonic() < until:
        listener.collect(landed)
        link.flush()
    assert [tag[:6] for _, tag in landed] == [b"%06d" % number for number in range(sent)]
    assert not link.pending
    assert link.sent == sent
    listener.close()
    link.close()


def test_a_reader_that_closes_is_noticed_by_the_next_tag() -> None:
    listener = tags.TagListener("127.0.0.1")
    link = tags.TagLink("peer 'p'", ("127.0.0.1", listener.port), tags.greeting(listener.secret, IDENT, "w"))
    link.enqueue(b"t")
    landed: deque[tuple[tags.Sender, bytes]] = deque()
    while not landed:
        listener.collect(landed)
    listener.close()
    with pytest.raises(PeerDisconnected, match="peer 'p' is gone"):
        link.enqueue(b"t")
    link.close()


def test_nobody_at_the_port_is_an_error_of_the_first_tag() -> None:
    listener = tags.TagListener("127.0.0.1")
    listener.close()
    link = tags.TagLink("peer 'p'", ("127.0.0.1", listener.port), b"hello")
    with pytest.raises(PeerDisconnected, match=r"peer 'p' is gone: .*refused"):
        link.enqueue(b"t")
    link.close()


def test_an_address_that_is_not_ours_cannot_be_listened_at() -> None:
    with pytest.raises(TransportError, match=r"cannot listen for tags at 192\.0\.2\.77"):
        tags.TagListener("192.0.2.77")
