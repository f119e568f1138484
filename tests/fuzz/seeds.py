"""Valid inputs of every kind, as seeds of the fuzzers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import orjson

from kvctl.client import recording_file as recording
from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault
from kvctl.client.recordings import Answer, RecordedAgent, RecordedSnapshot, encode
from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.protocol import bootstrap_registry as registry
from kvctl_agent.protocol import codec
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.security import unix_router
from kvctl_agent.telemetry import records as rec
from kvctl_agent.telemetry.region import LEAST_LOG_BYTES, Cell, Header, RegionWriter, log_offset
from tests.support.exporter import recorded
from tests.support.protocol.example_messages import EVERY, TAG

_RANK = registry.Rank("prefill-0", "tcp://127.0.0.1:7000", 1, [0, 0, 0, 0], [1, 1, 1, 2])
_ANSWER = registry.Roster([_RANK], 2, "1 of 2 prefill ranks registered, missing tp=1")
_LENGTHS = [(32).to_bytes(4, "little") + b"t" * 32, (4096).to_bytes(4, "little"), b"\xff" * 4]
_ENDPOINT = Endpoint("decode-0", Path("/run/kvctl/decode-0.sock"))
_HELLO = {"name": "decode-0", "role": "decode", "incarnation": "c0ffee", "now_ns": 7}
_SNAPSHOT = RecordedSnapshot(
    5,
    Path("/run/kvctl"),
    [Endpoint("decode-1", None, remote="tcp://10.0.0.5:7")],
    [Fault("decode-2", "unreachable", "no such agent")],
    [RecordedAgent(_ENDPOINT, 9, ClockOffset(1, 2), [Answer("hello", None, _HELLO), Answer("room", "7", [])])],
    ["timelines"],
)
_RECORDING = (
    recording.file_header()
    + recording.encode_frame(recording.HEAD, {"made": "now"})
    + b"".join(encode(_SNAPSHOT, 0))
    + recording.encode_frame(recording.DONE, {"frames": 3})
)


def _documents(document: dict[str, Any]) -> list[Any]:
    """Returns the documents of a snapshot's frames."""
    return [{**document, "agents": []}, *document["agents"]]


def _edit(place: int, offset: int, content: bytes) -> bytes:
    """One edit of the target `region`."""
    return struct.pack("<BIB", place, offset, len(content)) + content


def _end_of_log(written: int, reserved: int | None = None) -> bytes:
    ends = struct.pack("<qq", written if reserved is None else reserved, written)
    return _edit(1, 8 * Cell.RESERVED, ends)


_REGION = RegionWriter(Header.of_this_process("decode", "decode-0", log_bytes=LEAST_LOG_BYTES))
for _record in (b"record", b"another", bytes(200)):
    _REGION.append(_record)
_LOG = _REGION.content(log_offset(), 237)
_DOCUMENT = msgspec.msgpack.encode({"keys": ["agent", "registry"], "rows": [["decode-0", "ipc:///x"]], "calls": ["a"]})


def _records(*records: list[Any]) -> bytes:
    """Input of the target `region-records`."""
    encoded = map(msgspec.msgpack.encode, records)
    return b"".join(len(each).to_bytes(2, "little") + each for each in encoded)


_MOMENTS = {"ready": 1_000, "posted": 2_000, "arrived": 3_000}
_FIELDS = [1, 7, 9, 500, 3, 600, 1_000, 900, 1_500, 4_000, 2, None, 1, 1, 99, 4, 4096, 1, 0, "request", ""]
_ROOM_RECORDS: list[list[Any]] = [
    [rec.OPENED, 1, 7, 9, 500],
    [rec.ROOM, *_FIELDS],
    [rec.PEERS, 1, 0, ["prefill-0"], [9]],
    [rec.EVENT, 1, "granted", 800, 0, 0, [0, 32], "prefill-0", ""],
    [rec.PART, 1, [0, 0, [0, 32]], "prefill-0", "staged", 4096, _MOMENTS, None],
    [rec.NOTED, 1, 700, "room", "warning", 7, None, "text"],
    [rec.TRANSFER_BEGUN, 7, 99, 600],
    [rec.TRANSFER_ARRIVED, 7, "decode-0", 700, 20],
    [rec.TRANSFER_CANCELLED, 7, 800],
    [rec.BASE_BEGUN, 1, 5],
    [rec.BASE_ROOM, *_FIELDS],
    [rec.BASE_ENDED, 1],
    [rec.FAILED, 1, "prefill-0", "ABORTED", 5, "text", 3_500],
    [rec.FINISHED, *_FIELDS, 4_000],
    [
        rec.SEVERAL,
        [[rec.OPENED, 2, 8, 9, 500], [rec.SEVERAL, [[rec.FAILED, 2, "prefill-0", "ABORTED", 5, "text", 3_500]]]],
    ],
]
_OF_ROOM = {"room": 7, "nonce": 1000}  # that the machines of the target have

SEEDS: dict[str, list[bytes]] = {
    "control": [
        codec.encode(9, EVERY),
        *(codec.encode(7, [message]) for message in EVERY),
        codec.MAGIC + bytes(8) + msgspec.msgpack.encode([{"t": "no-such-message"}, {"t": "bye", "drained": True}]),
        codec.MAGIC + bytes(8) + b"\xdd\xff\xff\xff\xff",
        codec.MAGIC + bytes(8) + b"\x91" * 2000,
        codec.MAGIC + bytes(8) + b"\x91\x82\xa1t\xa9heartbeat\xa7sent_ns\xcb\x7f\xf8" + bytes(6),  # not a number
        codec.MAGIC + bytes(8) + b"\x91\x82\xa1t\xa2\xc3\x28\xa4room\x01",  # no UTF-8
    ],
    "machine": [
        codec.encode(7, [msgspec.structs.replace(message, **_OF_ROOM) if hasattr(message, "room") else message])
        for message in EVERY
    ],
    "tag": [
        TAG,
        Tag(PartKind.AUX, 1, 2, 3, 0, PartKey(0, 0, 0, 0)).pack(),
        Tag(PartKind.AUX, 1, 2, 3, 0, PartKey(0, 0, 0, 0), row=b"row").pack(),
    ],
    "registry": [
        registry.encode(registry.Register(_RANK)),
        registry.encode(registry.Lookup("decode-0")),
        registry.encode(
            registry.Lookup("decode-0", 7, registry.Whereabouts("tcp://0.0.0.0:7311", "/run/x.sock", "node"))
        ),
        b'{"cmd": "agents", "args": {}}',
        b'{"cmd": "agents", "args": {"limit": 1}}',
        registry.encode(_ANSWER),
        registry.encode(registry.Register(registry.Rank("x", "y", 1, [0] * 4, [2**31] * 4))),
    ],
    "admin": [
        *(MAGIC + b"\n1\n" + orjson.dumps({"cmd": command.name, "args": {}}) for command in COMMANDS),
        orjson.dumps({"cmd": "room", "args": {"room": str(2**64 - 1)}}),
        orjson.dumps({"cmd": "events", "args": {"since": 2**63 - 1, "limit": 5}}),
        orjson.dumps({"cmd": "romms"}),
        b'{"cmd": "room", "args": {"room": ' + b"[" * 900 + b"]" * 900 + b"}}",
    ],
    "tag-stream": [bytes([step]) + b"".join(_LENGTHS[:count]) for step in (1, 3, 129) for count in (1, 2, 3)]
    + [b"\2kvctltag" + bytes(64)],
    "zmtp": [
        b"\1" + unix_router.encode_message([b"KVA1", b"1", b"x" * 300]),
        b"\x0a" + unix_router.OPENING + unix_router.encode_message([b"a", b""]) * 3,
        b"\1\4\x16\5READY\x0bSocket-Type\0\0\0\xffX",
        b"\1\4\7\4PING\0\1",
    ],
    "recorded-snapshot": [b"\n".join(map(orjson.dumps, _documents(_SNAPSHOT.document())))],
    "recording": [_RECORDING, _RECORDING[:40]],
    "region": [
        b"",
        _edit(2, 0, _LOG) + _end_of_log(237),
        _edit(2, 0, _LOG[:-1]) + _end_of_log(237),
        _end_of_log(1 << 17),
        _end_of_log(1 << 40, 1 << 40),
        _end_of_log(-1, 1 << 62),
        _edit(0, 0, _REGION.header.pack()[:80]),
        _edit(1, 8 * Cell.PUBLISHED, struct.pack("<10q", *range(10))) + _edit(3, 0, bytes(16)),
    ],
    "region-document": [
        _DOCUMENT,
        msgspec.msgpack.encode({"state": "running", "peers": {"ready": 2}, "ring": None}),
        msgspec.msgpack.encode({"keys": ["agent"], "rows": [[1, 2], 3]}),
        b"\x81\xa4rows" + b"\x91" * 2000,
    ],
    "region-records": [
        _records(*_ROOM_RECORDS),
        _records(*_ROOM_RECORDS[:-1]),
        *(_records(_ROOM_RECORDS[0], record) for record in _ROOM_RECORDS[1:]),
        _records([rec.PART, 1, [0, 0, [0, 0]], None, "bulk", 1, {"ready": -(2**62), "done": 2**62}, None]),
    ],
    "metrics": [
        recorded("nixl").encode(),
        recorded("vllm-decode").encode()[-3000:],
        recorded("sglang-prefill").encode()[:3000],
        b'# TYPE vllm:prompt_tokens_by_source histogram\nvllm:prompt_tokens_by_source_bucket{le="x"} 1e308\n',
        b"# TYPE agent_tx_bytes counter\nagent_tx_bytes_total 1e308\nagent_xfer_time_total NaN\n",
        b"\x1f\x8b\x08\x00\x1b[31mnixlBackendError: NIXL_ERR_BACKEND",
    ],
    "endpoint": [
        *(
            b"tcp://127.0.0.1:7000",
            b"tcp://[fe80::1%eth0]:7000",
            b"tcp://node-1.example:1",
            b"tcp://*:0",
            b"ipc:///run/boot",
        ),
        *(
            b"tcp://[::1:14579",
            b"tcp://[host]:1",
            b"tcp://[]:1",
            b"tcp://127.0.0.1:9000/",
            b"127.0.0.1:7311+",
            b"[::1]",
        ),
        *(b'["::1", 7000]', b'["127.0.0.1]", 1e999]', b'["[::1", Infinity]', b"ipc:///a\0b", b"tcp://0x7f.1:1"),
    ],
    "cli-endpoint": [
        *(
            b"tcp://node-1:7000",
            b"ipc:///run/a.sock",
            b"/run/a.sock",
            b"registry://node-0:7000",
            b"registry:///run/boot",
        ),
        *(
            b"dns://agents.example:7311+8",
            b"kubernetes://ns/app=kv?port=7311&via=port-forward",
            b"file:///x",
            b"tcp://[::1",
        ),
        *(b"tcp://a:1\n# comment\n/run/b.sock\ntcp://b:0", b"/a\0b", b"dns://kv:1", b"kubernetes://[/a"),
    ],
    "registry-row": [
        orjson.dumps(
            {"name": "decode-0", "role": "decode", "host": "n1", "incarnation": "1", "admin": admin}
            | {"socket": path, "address": address, "heard_ns": 1}
        )
        for admin, path, address in (
            *(
                ("tcp://0.0.0.0:7311", "", "10.0.0.7"),
                ("tcp://[::]:7311", "", "127.0.0.1"),
                ("tcp://*:1", "", "fe80::1%eth0"),
            ),
            *(
                ("", "/run/x.sock", ""),
                ("tcp://[::1:7", "/x", "[::1"),
                ("tcp://0.0.0.0:0", "", "x"),
                ("ipc:///run/x.sock", "", ""),
            ),
        )
    ],
    "vllm-request": [
        orjson.dumps({"transfer_id": transfer, "kvctl_prefill": prefill, "traceparent": trace})
        for transfer, prefill, trace in (
            ("7f3a", "tcp://10.0.0.5:14579", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            *((2**64 - 1, "tcp://[::1:14579", ""), (-1, "tcp://127.0.0.1:9000/", None), (True, "ipc:///x", [])),
            *((1.5, 7, "0"), ("", "tcp://[]:1", ""), ([], {}, {})),
        )
    ]
    + [
        b'{"transfer_id": "\\ud800", "kvctl_prefill": "\\ud800"}',
        b"[" * 900,
        b'{"transfer_id": 1e999}',
        b"7f3a",
        b"[1]",
    ],
    "sglang-lookup": [
        *(b'\0{"rank_ip": "127.0.0.1", "rank_port": 7000}', b'\0{"rank_ip": "::1", "rank_port": "7000"}'),
        *(
            b'\0{"rank_ip": "127.0.0.1", "rank_port": 1e999}',
            b'\0{"rank_ip": "[::1", "rank_port": 1}',
            b"\0" + b"[" * 2000,
        ),
        *(b'\0{"1": 0, "2": 65536, "3": "x"}', b"\1HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}"),
        b"\1HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        *(b"\1HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n{}", b"\1HTTP/1.1 100 Continue\r\n\r\n"),
    ],
}
