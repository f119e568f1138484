"""Every parser of outside data, as a function that raises only if there is a bug.

Hypothesis runs them in the test suite, atheris in `make fuzz`: an input found by one becomes a seed for both.
"""

from __future__ import annotations

import contextlib
import struct
import time
import zlib
from collections.abc import Callable
from io import BufferedReader, BytesIO
from typing import Any

import orjson

from kvctl.client.endpoints import Endpoint
from kvctl.client.metrics.reader import MetricsReader
from kvctl.client.metrics.scrape import ScrapeError, parse
from kvctl.client.recording_file import RecordingError, read_frames
from kvctl.client.recordings import decode
from kvctl.logs.scan import LogError, Scan
from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.errors import RegionError, RemoteProtocolError, RequestRefused
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.observer import documents
from kvctl_agent.observer.fold import Fold
from kvctl_agent.observer.requests import parse_body, parse_frames, request_id
from kvctl_agent.protocol import bootstrap_registry, codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import Tag
from kvctl_agent.security import unix_router
from kvctl_agent.telemetry import region as regions
from kvctl_agent.telemetry.clock import Clock
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
    """A recording: its frames, and the snapshot that they contain."""
    with contextlib.suppress(RecordingError):
        decode(0, [frame.body for frame in read_frames(BytesIO(data))][1:])


def recorded_snapshot(data: bytes) -> None:
    """The documents of a snapshot, one a line: its own fields, and the answers of each agent."""
    with contextlib.suppress(RecordingError):
        decode(0, list(map(zlib.compress, data.split(b"\n"))))


REGION_EDIT = struct.Struct("<BIB")
REGION_PLACES = (
    0,
    regions.HEADER_BYTES,
    regions.log_offset(),
    *(regions._document_offset(document, buffer) for document in regions.Document for buffer in range(2)),
)
_REGION_HEADER = regions.Header.of_this_process("decode", "decode-0", log_bytes=regions.LEAST_LOG_BYTES)
_DOCUMENTS: tuple[Any, ...] = (
    (regions.Document.IDENTITY, documents.Identity),
    (regions.Document.STATE, documents.State),
    (regions.Document.CONFIG, documents.Configuration),
    (regions.Document.BOOTSTRAP, documents.Registries),
    (regions.Document.PEERS, documents.Peers),
    (regions.Document.STAGING, documents.Ring),
    (regions.Document.STAGING, documents.GatedParts),
    (regions.Document.ROOMS, documents.Diagnoses),
    (regions.Document.COSTS, documents.Costs),
    (regions.Document.STACK, documents.Stack),
)


def region(data: bytes) -> None:
    """Edits of a region, each with place, offset, length and bytes, and then its header, log and documents."""
    writer = regions.RegionWriter(_REGION_HEADER)
    writer.append(b"record")
    writer.publish(regions.Document.STATE, b"\x81\xa5state\xa7running", 1)
    at = 0
    while len(data) - at > REGION_EDIT.size:
        place, offset, size = REGION_EDIT.unpack_from(data, at)
        at += REGION_EDIT.size
        begin = REGION_PLACES[place % len(REGION_PLACES)] + offset % (1 << 18)
        piece = data[at : at + size][: max(0, _REGION_HEADER.size - begin)]
        writer._map[begin : begin + len(piece)] = piece
        at += size
    with contextlib.suppress(RegionError):
        header = regions.Header.unpack(writer.content(0, regions.HEADER_BYTES))
        assert header.size <= regions.log_offset() + (1 << 30)
    reader = regions.MemoryReader(writer)
    for _ in range(3):
        position = reader.position
        assert sum(map(len, reader.records().records)) <= _REGION_HEADER.log_bytes
        assert reader.position >= position
    for document, kind in _DOCUMENTS:
        assert isinstance(documents.RegionDocuments(reader).read(document, kind), documents.AnyDocument)


def region_document(data: bytes) -> None:
    """The content of a document, of any kind."""
    for _, kind in _DOCUMENTS:
        documents.decoded(data, kind)


def region_records(data: bytes) -> None:
    """Records of a log, each behind its length in two bytes, and then all that the admin commands read of the fold."""
    limits = {"history": 4, "failed": 4, "timeline_events": 8, "recorder_events": 8}
    fold, now_ns, at = Fold("decode-0", "decode", Clock(), **limits), time.monotonic_ns(), 0
    while len(data) - at > 2:
        size = int.from_bytes(data[at : at + 2], "little")
        fold.apply(data[at + 2 : at + 2 + size])
        at += 2 + size
    rows = [
        *fold.rooms.rows(None, 100),
        *fold.rooms.history(100),
        *fold.rooms.slow(100),
        *fold.rooms.failed(100)["rooms"],
    ]
    details = [fold.rooms.detail(int(row["room"])) for row in rows[:8]]
    fold.transfers.ahead(now_ns)
    fold.transfers.fit("prefill-0", now_ns)
    rates = fold.rate.window(now_ns), fold.latencies.summary(), fold.recent_ends.counts(now_ns)
    others = fold.stages.rows(), fold.recorder.since(None, 100), fold.metrics.snapshot(), fold.rooms.states()
    orjson.dumps([rows, details, rates, others], option=orjson.OPT_NON_STR_KEYS)


def metrics(data: bytes) -> None:
    """Metrics of an engine, as its server answers them; and the same bytes as a log."""
    with contextlib.suppress(ScrapeError):
        rows = parse(data)
        answers = MetricsReader()._answers(Endpoint("server", None, remote="http://server:1/metrics"), rows)
        orjson.dumps(answers, option=orjson.OPT_NON_STR_KEYS)
    with contextlib.suppress(LogError):
        Scan().read("log", BufferedReader(BytesIO(data)))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "control": control_frame,
    "machine": machine,
    "tag": tag,
    "registry": registry,
    "admin": admin_request,
    "tag-stream": tag_stream,
    "zmtp": zmtp_stream,
    "recording": recorded_file,
    "recorded-snapshot": recorded_snapshot,
    "region": region,
    "region-document": region_document,
    "region-records": region_records,
    "metrics": metrics,
    "endpoint": entry_points.endpoint,
    "cli-endpoint": entry_points.cli_endpoint,
    "registry-row": entry_points.registry_row,
    "vllm-request": entry_points.vllm_request,
    "sglang-lookup": entry_points.sglang_lookup,
}
