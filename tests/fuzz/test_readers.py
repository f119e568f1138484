"""Every reader of bytes from outside: whatever comes, the worst is its own error; little memory, little time."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl_agent.protocol import codec
from tests.fuzz.seeds import SEEDS
from tests.fuzz.targets import TARGETS

NAMES = sorted(TARGETS)
MIB = 1 << 20
H = codec.MAGIC + bytes(8)


@st.composite
def mutated(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A real message with bytes changed, cut out, doubled or put in."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.integers(0, 16)))
        match draw(st.sampled_from(["set", "cut", "double", "insert", "length"])):
            case "set":
                data[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
            case "cut":
                del data[at:end]
            case "double":
                data[at:at] = data[at:end]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "length":  # of a string, bytes, list or map that is not there
                data[at:at] = draw(st.sampled_from([b"\xdd", b"\xdf", b"\xdb", b"\xc6"])) + b"\xff" * 4
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_real_bytes_are_read(name: str) -> None:
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_real_bytes_that_were_tampered_with(name: str, data: st.DataObject) -> None:
    TARGETS[name](data.draw(mutated(SEEDS[name])))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.binary(max_size=512))
def test_any_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


FIELDS = {
    "admin": ["cmd", "args"],
    "vllm-request": ["transfer_id", "kvctl_prefill", "traceparent", "do_remote_prefill", "do_remote_decode"],
    "registry-row": ["name", "role", "host", "admin", "socket", "address", "heard_ns"],
}


@pytest.mark.parametrize("name", FIELDS)
@settings(max_examples=60)
@given(data=st.data())
def test_json_of_any_shape_under_the_right_names(name: str, data: st.DataObject) -> None:
    import json as text

    values = json | st.sampled_from(["room", "events", "tcp://10.0.0.5:7", "tcp://[::1", "ipc:///x", "\ud800", 2**64])
    document = {field: data.draw(values) for field in FIELDS[name]}
    TARGETS[name](text.dumps(document).encode())


BOMBS = {
    "a list that claims four billion messages": ("control", H + b"\xdd\xff\xff\xff\xff"),
    "fifteen million nothings": ("control", H + b"\xdd" + (15 * MIB).to_bytes(4, "big") + b"\xc0" * (15 * MIB)),
    "lists in lists": ("control", H + b"\x91" * (15 * MIB)),
    "a map of fifteen million bytes": ("control", H + b"\x91\xdf" + (7 * MIB).to_bytes(4, "big") + b"\0\0" * (7 * MIB)),
    "a string that is not there": ("control", H + b"\x91\x81\xa1t\xdb\xff\xff\xff\xff"),
    "too large a frame": ("control", H + bytes(codec.MAX_FRAME_BYTES)),
    "ranks in the billions": ("registry", SEEDS["registry"][-1]),
    "a request of lists in lists": ("admin", b"[" * MIB),
    "a room number of a million digits": ("admin", b'{"cmd":"room","args":{"room":"' + b"9" * 1_000_000 + b'"}}'),
    "a number of a million digits": ("admin", b'{"cmd":"events","args":{"since":' + b"9" * 1_000_000 + b"}}"),
    "a million unknown fields": ("admin", b"{" + b",".join(b'"%d":0' % n for n in range(90_000)) + b"}"),
    "an endpoint of a megabyte": ("endpoint", b"tcp://" + b"a." * (MIB // 2) + b":1"),
    "a list of half a million endpoints": ("cli-endpoint", b"/a\n" * (MIB // 3)),
    "a transfer of a megabyte": ("vllm-request", b'{"transfer_id":"' + b"9" * MIB + b'","kvctl_prefill":"tcp://a:1"}'),
    "a transfer of a million digits": ("vllm-request", b'{"transfer_id":' + b"9" * 1_000_000 + b"}"),
    "parameters of lists in lists": ("vllm-request", b"[" * MIB),
    "an answer of lists in lists": ("sglang-lookup", b"\0" + b"[" * 60_000),
    "an answer of chunks of petabytes": (
        "sglang-lookup",
        b"\1HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"fffffffffffff\r\n" * 3000,
    ),
    "a tag of four billion bytes": ("tag-stream", b"\1" + b"\xff" * 4 + bytes(4 * MIB)),
    "a greeting without end": ("tag-stream", b"\2" + b"kvctltag" + bytes(4 * MIB)),
    "a recording whose frame claims gigabytes": ("recording", b"KVCTLREC" + b"\1\0\0\0" + b"SEEN" + b"\xff" * 12),
    "a snapshot of lists in lists": ("recorded-snapshot", b"[" * MIB),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_its_sender_more_than_us(bomb: str) -> None:
    """At most 32 times the memory that came in (JSON is the worst), and a few seconds."""
    name, data = BOMBS[bomb]
    began = time.process_time()
    TARGETS[name](data)
    assert time.process_time() - began < 10
    tracemalloc.start()
    try:
        TARGETS[name](data)
        assert tracemalloc.get_traced_memory()[1] < 32 * len(data) + MIB
    finally:
        tracemalloc.stop()
