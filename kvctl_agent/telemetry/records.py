"""Records of a region's log: MessagePack arrays of the record's kind, and of the fields that `FIELDS` lists for it.

Writers encode plain tuples; `decode` checks the types. Times are monotonic ns. `serial` numbers the rooms of one
agent's life, since room numbers may be reused and a prefill rank does not know the nonce at first.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Union

import msgspec

from kvctl_agent.contract.states import RoomState

Severity = Literal["debug", "info", "warning", "error"]
PartKey = tuple[int, int, tuple[int, int]]
"""Writer, chunk and layers [lo, hi) of a part."""

_Count = Annotated[int, msgspec.Meta(ge=0)]

OPENED: Final = 1
ROOM: Final = 2
PEERS: Final = 3
EVENT: Final = 4
PART: Final = 5
FAILED: Final = 6
FINISHED: Final = 7
NOTED: Final = 8
TRANSFER_BEGUN: Final = 9
TRANSFER_ARRIVED: Final = 10
TRANSFER_CANCELLED: Final = 11
BASE_BEGUN: Final = 12
BASE_ROOM: Final = 13
BASE_ENDED: Final = 14
SEVERAL: Final = 15

ROOM_FIELDS: Final[dict[str, Any]] = {
    "serial": int,
    "room": _Count,
    "nonce": _Count,
    "opened_at": int,
    "state_now": RoomState,
    "state_at": int,
    "first_ready_at": int | None,
    "forward_begun_at": int | None,
    "forward_done_at": int | None,
    "finished_at": int | None,
    "planned": int | None,
    "sent": int | None,
    "landed": int | None,
    "scattered": int | None,
    "tokens": int | None,
    "pages": int | None,
    "bytes": _Count,
    "parts": _Count,
    "parked": int,
    "request_id": str,
    "traceparent": str,
}
"""Values of a room: attributes of `room_records.RoomValues`."""

FIELDS: Final[dict[int, dict[str, Any]]] = {
    # A room was opened.
    OPENED: {"serial": int, "room": _Count, "nonce": _Count, "at_ns": int},
    # Values of a room that have changed.
    ROOM: ROOM_FIELDS,
    # Peers and nonces of a room; those from index `first` on replace all that are known from there on.
    PEERS: {"serial": int, "first": _Count, "peers": list[str], "nonces": list[_Count]},
    # One event of a room's timeline, that is of no part that was transferred.
    EVENT: {
        "serial": int,
        "stage": str,
        "at_ns": int,
        "writer": int | None,
        "chunk": int | None,
        "layers": tuple[int, int] | None,
        "peer": str | None,
        "detail": str,
    },
    # A part that was sent or received; fields as the arguments of `Telemetry.part`.
    PART: {
        "serial": int,
        "key": PartKey,
        "peer": str | None,
        "path": str,
        "nbytes": _Count,
        "moments": dict[str, int],
        "forward_done_ns": int | None,
    },
    # Cause of a failure; `failed_ns` is the wall clock of the rank that found it, this one learned of it at `at_ns`.
    FAILED: {"serial": int, "rank": str, "code": str, "failed_ns": int, "text": str, "at_ns": int},
    # A room has ended, and its values are final.
    FINISHED: {**ROOM_FIELDS, "at_ns": int},
    # An entry of the flight recorder: `flight_recorder.Entry`.
    NOTED: {
        "sequence": _Count,
        "at_ns": int,
        "kind": str,
        "severity": Severity,
        "room": _Count | None,
        "peer": str | None,
        "text": str,
    },
    # Transfers of a prefill rank's rooms; fields as the arguments of the methods of `observer.transfer_times`.
    TRANSFER_BEGUN: {"room": _Count, "tokens": _Count, "at_ns": int},
    TRANSFER_ARRIVED: {"room": _Count, "peer": str, "sent_ns": int, "rtt_ns": int | None},
    TRANSFER_CANCELLED: {"room": _Count, "at_ns": int},
    # All active rooms with smaller serials than `next_serial` follow, between other records, until they have ended.
    BASE_BEGUN: {"number": int, "next_serial": int},
    BASE_ROOM: ROOM_FIELDS,
    BASE_ENDED: {"number": int},
    # Records that were written at once.
    SEVERAL: {"records": list[msgspec.Raw]},
}
"""Fields of each kind of record and their types, in their order."""

_TYPES: Final = {
    msgspec.defstruct(f"Record{kind}", list(fields.items()), array_like=True, tag=kind): kind
    for kind, fields in FIELDS.items()
}
_decode: Final = msgspec.msgpack.Decoder(Union[tuple(_TYPES)]).decode  # noqa: UP007


def decode(record: bytes) -> tuple[int, tuple[Any, ...]]:
    """Returns kind and fields of a record; raises an exception if it is damaged, or of another version."""
    decoded: Any = _decode(record)
    return _TYPES[type(decoded)], msgspec.structs.astuple(decoded)
