"""Every parser of outside data, as a function that raises only if there is a bug.

Hypothesis runs them in the test suite, atheris in `make fuzz`: an input found by one becomes a seed for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from io import BytesIO

import orjson

from kvctl.lab.bench import trace
from kvctl.lab.replay.recordings import decode_inputs
from kvctl_agent.admin.requests import parse_body, parse_frames, request_id
from kvctl_agent.contract import recording
from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.errors import RecordingError, RecordingVersionError, RemoteProtocolError, RequestRefused
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.protocol import bootstrap_registry, codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.checkpoint import unpack
from kvctl_agent.protocol.tag import Tag
from kvctl_agent.security import unix_router
from kvctl_agent.transport.base import MAX_TAG_BYTES
from kvctl_agent.transport.mooncake import tags
from tests.fuzz import entry_points
from tests.support.protocol.simulation import World

SECRET = b"s" * tags.SECRET_BYTES
_LONGEST_REFUSAL = 8192


def control_frame(data: bytes) -> None:
    """A frame of the control channel; a decoded message survives another round trip."""
    with contextlib.suppress(RemoteProtocolError):
        incarnation, messages, unknown = codec.decode(data)
        assert 0 <= unknown <= codec.MAX_MESSAGES
        again = codec.encode(incarnation, messages)
        assert codec.decode(again) == (incarnation, messages, 0)


def machine(data: bytes) -> None:
    """A frame of the control channel, taken by both machines as from their peer in a room."""
    try:
        _, messages, _ = codec.decode(data)
    except RemoteProtocolError:
        return
    if not messages:
        return
    world = World(ParallelConfig(), ParallelConfig())
    world.connect()
    world.receive(7, 3, nonce=1000)
    world.send(7, 3, groups=[1])
    for to, by in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        for message in messages:
            world.machines[to].handle(ev.Received(by, world.machines[by].local.incarnation, message), world.now_ns)
        world.machines[to].handle(ev.Tick(), world.now_ns + 1)


def tag(data: bytes) -> None:
    """The tag of a write; its encoding is unique."""
    with contextlib.suppress(RemoteProtocolError):
        assert Tag.unpack(data).pack() == data


def registry(data: bytes) -> None:
    """A request to the registry, and its answer."""
    with contextlib.suppress(RemoteProtocolError):
        request = bootstrap_registry.decode_request(data)
        answer = bootstrap_registry.Registry().answer(request, 0)
        assert bootstrap_registry.decode_roster(bootstrap_registry.encode(answer)) == answer
    with contextlib.suppress(RemoteProtocolError):
        bootstrap_registry.decode_roster(data)
    for frames in ([MAGIC, *data.split(b"\n")], [MAGIC, b"1", data]):
        magic, number, body = bootstrap_registry.Registry().reply(frames, 0, 0)
        assert (magic, len(number) <= 64, "ok" in orjson.loads(body)) == (MAGIC, True, True)


def admin_request(data: bytes) -> None:
    """A request to the admin socket: its frames, divided by line feeds, and its body; a refusal can be sent back."""
    frames = data.split(b"\n")
    assert len(request_id(frames)) <= 64
    for read in (lambda: parse_frames(frames), lambda: parse_frames([MAGIC, b"1", data]), lambda: parse_body(data)):
        refusal = ""
        try:
            read()
        except RequestRefused as error:
            refusal = str(error)
        assert len(refusal.encode("utf-8", "backslashreplace")) < _LONGEST_REFUSAL


def zmtp_stream(data: bytes) -> None:
    """Data arriving at a Unix socket: the first byte determines its split and whether the handshake is complete."""
    if not data:
        return
    step, stream = data[0] >> 1 or 1 << 18, data[1:]
    if data[0] & 1:
        stream = unix_router.OPENING + stream
    decoder = unix_router.MessageDecoder(4096)
    with contextlib.suppress(RemoteProtocolError):
        for at in range(0, len(stream), step):
            for frames in decoder.feed(stream[at : at + step]):
                assert decoder.identity is not None
                assert 1 <= len(frames) <= unix_router.MAX_FRAMES
                assert max(map(len, frames)) <= 4096


def trace_line(data: bytes) -> None:
    """A line of a request trace; an accepted request is within the limits of the bench."""
    with contextlib.suppress(ValueError):
        prompt = trace.parse(data)
        assert 0 < prompt.tokens <= trace.MAX_TOKENS
        assert len(prompt.blocks) <= -(-prompt.tokens // trace.BLOCK_TOKENS)


def tag_stream(data: bytes) -> None:
    """Data arriving at the port for tags: the first byte determines its split and whether the secret is known."""
    if not data:
        return
    step, stream = data[0] >> 1 or 1 << 18, data[1:]
    if data[0] & 1:
        stream = tags.greeting(SECRET, "i" * tags.IDENT_BYTES, "writer") + stream
    sender = tags.Sender(None)  # type: ignore[arg-type]  # bytes are given, none are received
    with contextlib.suppress(ValueError):
        for at in range(0, len(stream), step):
            for landed in sender.take(SECRET, stream[at : at + step]):
                assert sender.ident
                assert 0 < len(landed) <= MAX_TAG_BYTES
            assert len(sender._pending) <= MAX_TAG_BYTES + 4


def recorded_file(data: bytes) -> None:
    """A recording: its frames and their contents."""
    with contextlib.suppress(RecordingError, RecordingVersionError):
        for frame in recording.read_frames(BytesIO(data)):
            with contextlib.suppress(RecordingError):
                recorded_piece(recording.decompress(frame.body))


def recorded_piece(data: bytes) -> None:
    """The contents of a recording's frame: inputs, or a machine's state."""
    with contextlib.suppress(RecordingError, RecordingVersionError):
        list(decode_inputs(0, data))
    with contextlib.suppress(RecordingError, RecordingVersionError):
        unpack(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "control": control_frame,
    "machine": machine,
    "tag": tag,
    "registry": registry,
    "admin": admin_request,
    "trace": trace_line,
    "tag-stream": tag_stream,
    "zmtp": zmtp_stream,
    "recording": recorded_file,
    "recorded-piece": recorded_piece,
    "endpoint": entry_points.endpoint,
    "cli-endpoint": entry_points.cli_endpoint,
    "registry-row": entry_points.registry_row,
    "vllm-request": entry_points.vllm_request,
    "sglang-lookup": entry_points.sglang_lookup,
}
