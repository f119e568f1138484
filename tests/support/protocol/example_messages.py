"""A valid message of every type, for tests of the codec and as seeds of fuzzers."""

from __future__ import annotations

from kvctl_agent.protocol import messages as msg
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag

VERSION = msg.PROTOCOL_VERSION

WHO = msg.PeerInfo(
    "d",
    "decode",
    [0] * 4,
    [1, 2, 1, 1],
    0,
    {"page_size": 1},
    {"slots": [1]},
    "nixl",
    b"\0",
    "h",
    1,
    stages=[3, 1],
    cp_mode="all",
    shared=[msg.SharedMemory(2**62 - 1, 2**62 - 1, "ipc", b"\0" * 64, "GPU-1")],
    unshared="why",
    dtypes={"kv": "bfloat16"},
)
TAG = Tag(PartKind.KV, 7, 1, 2, 3, PartKey(0, 0, 0, 32)).pack()
EVERY: list[msg.Message] = [
    msg.Hello(VERSION, WHO),
    msg.HelloAck(VERSION, WHO, 7, ["page_size 64 ≠ 32"]),
    msg.HelloWanted(),
    msg.Heartbeat(1, 2, 3, [4, 5, 6]),
    msg.RoomOpen(2**64 - 1, 2**64 - 1, b"\1\0\0\0", 0, 1, {"prefill.tp": 2, "cp_mode": "rank0"}, 3),
    msg.RoomOpen(1, 2, b"", 0, 0, {}, -1, [b"\1\0\0\0", b""], True),
    msg.RoomOpen(3, 2, b"", 0, 1, {}, tokens=7, digest=2**64 - 1),
    msg.RoomKept(1, 2, 3),
    msg.RoomAccepted(1, 2),
    msg.RoomRefused(1, 2, "prefill-0", "CODE", 3, "text"),
    msg.StagingRequest(1, 2, [msg.PartSpec(0, 0, 32, 512)]),
    msg.StagingGrants(1, 2, [msg.Grant(0, 0, 32, 1, 0, 512, 0)], [0, 0, 0]),
    msg.StagingRefused(1, 2, 0, 0, 32, 512, 256),
    msg.StagingRevoke(1, 2, 0, 0, 32, 9),
    msg.StagingRevoked(1, 2, 9),
    msg.TooLate(1, 2, 9),
    msg.Watermark(1, 2, 3),
    msg.PartReady(1, 2, [TAG]),
    msg.PartAck(1, 2, [TAG]),
    msg.RoomDone(1, 2),
    msg.RoomDone(1, 2, 3),
    msg.ReadersDone(1, 2),
    msg.ReadersDone(1, 2, 3),
    msg.RoomFailed(1, 2, "decode-0", "CODE", 3, "text"),
    msg.Ack(1, 2, "room-done"),
    msg.RoomAbort(1, 2, "decode-0", "CODE", 3, "text"),
    msg.RoomAbort(1, 2, "decode-0", "RECALLED", 3, "text", recall=True),
    msg.RoomDrained(1, 2),
    msg.RoomRenew([1, 2**64 - 1]),
    msg.Bye(True),
]
