"""Documents of an observed rank, from SGLang's objects and from its tracker; the observer reads them in its region.

Only the fields that SGLang knows have values. It has no coverage cells, incarnations, round-trip times or per-layer
times: those are None. Dictionaries are copied before they are read: SGLang's threads change them, and a document with
many rows is built between other events.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from kvctl_agent.contract.snapshots import Bootstrap, GatedPart, PeerRow, RegisteredRank, RingAllocation, StagingBuffers
from kvctl_agent.integrations.observe import documents
from kvctl_agent.integrations.observe.documents import peer_row
from kvctl_agent.integrations.sglang.observe.manager_state import engine_of
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.integrations.sglang.releases import staging_context
from kvctl_agent.observer.documents import Builder, Diagnosis
from kvctl_agent.telemetry.region import Document


def builders(manager: Any, tracker: Tracker) -> dict[Document, Builder]:
    """Returns the builder of each document of one of SGLang's CommonKVManagers that changes."""
    state, peers = partial(_state, manager, tracker), partial(_peers, manager, tracker)
    bootstrap = {Document.BOOTSTRAP: partial(_bootstrap, manager, tracker)}
    found = documents.builders("SGLang", state, partial(_rooms, tracker), peers, bootstrap)
    return {**found, Document.STAGING: partial(_staging, manager, tracker)}


def _state(manager: Any, tracker: Tracker) -> Iterator[Mapping[str, Any]]:
    ring = _ring(manager)
    size, allocations = (0, {}) if ring is None else (ring.total_size, ring.allocations.copy())
    yield {
        "state": "running",
        "accepting": True,
        "ring": None
        if ring is None
        else {
            "size_bytes": size,
            "used_bytes": min(size, sum(nbytes for _, nbytes, _ in allocations.values())),
            "high_water_bytes": min(size, tracker.ring_high_water_bytes),
            "live": len(allocations),
        },
        "buffers": _buffers(manager),
        "peers": dict(Counter(state for _, _, state in _known_peers(manager, tracker))),
        "gated": len(tracker.waits),
    }


# ---- rooms -----------------------------------------------------------------------------------------------------


def _rooms(tracker: Tracker) -> Iterator[Diagnosis]:
    """Yields which writers have not reported the end of each active room of a decode rank."""
    for number, room in tracker.rooms.copy().items():
        if tracker.shape.role == "decode" and not room.record.state_now.finished:
            missing = [writer.name for writer in room.senders if writer.rank not in room.done]
            yield {"room": str(number), "nonce": "0", "missing": missing, "owed": {}, "owed_parts": []}


# ---- staging ---------------------------------------------------------------------------------------------------


def _ring(manager: Any) -> Any:
    """Returns SGLang's StagingAllocator; None on a prefill rank and without staging."""
    return getattr(staging_context(manager), "allocator", None)


def _staging(manager: Any, tracker: Tracker) -> Iterator[Mapping[str, Any]]:
    if tracker.shape.role == "prefill":
        yield {}
        yield from _gated_parts(manager, tracker)
        return
    ring, allocations = _ring(manager), _allocations(manager, tracker)
    yield {
        "ring": None
        if ring is None
        else {
            "size_bytes": ring.total_size,
            "head_bytes": ring.head,
            "round": ring.round,
            "used_bytes": sum(each["end"] - each["offset"] for each in allocations),
            "high_water_bytes": min(tracker.ring_high_water_bytes, ring.total_size),
            "watermark": {"round": ring.watermark_round, "tail": ring.watermark_tail, "age_ns": 0},
            "refused_largest_bytes": tracker.refused_largest_bytes or None,
        }
    }
    yield from allocations


def _allocations(manager: Any, tracker: Tracker) -> list[RingAllocation]:
    """Returns the live regions of SGLang's ring, oldest first."""
    ring = _ring(manager)
    if ring is None:
        return []
    receivers = getattr(staging_context(manager), "room_receivers", {}).copy().values()
    infos = (info for receiver in receivers for info in list(getattr(receiver, "chunk_staging_infos", ())))
    uncopied = {info[0] for info in infos}  # serials of the regions that SGLang has not begun to copy
    now_ns = time.monotonic_ns()
    return [
        _allocation(tracker, serial, offset, size, ring_round, serial in uncopied, now_ns)
        for serial, (offset, size, ring_round) in sorted(ring.allocations.copy().items())
    ]


def _allocation(
    tracker: Tracker, serial: int, offset: int, size: int, ring_round: int, uncopied: bool, now_ns: int
) -> RingAllocation:
    known = tracker.regions.get(serial)
    room = None if known is None else tracker.rooms.get(known.room)
    missing = [] if room is None or known is None else [writer.name for writer in room.owing(known.chunk)]
    # A region of a chunk that is in its pages already, which SGLang granted once more, is never copied.
    granted = missing or (known is not None and uncopied)
    return {
        "serial": serial,
        "room": "" if known is None else str(known.room),
        "nonce": "0",
        "writer": ", ".join(missing),
        "chunk": 0 if known is None else known.chunk,
        "layers": list(tracker.shape.layers),
        "offset": offset,
        "end": offset + size,
        "round": ring_round,
        "age_ns": 0 if known is None else max(0, now_ns - known.granted_ns),
        "state": "granted" if granted else "landed",
        "posted": False,
        "room_state": "gone" if room is None else room.record.state_now.label,
        "aside": False,
    }


def _gated_parts(manager: Any, tracker: Tracker) -> Iterator[GatedPart]:
    shape, now_ns = tracker.shape, time.monotonic_ns()
    sizes = {_endpoint(info): _tp_size(info) for _, info in _decode_ranks(manager)}
    for (room, chunk, endpoint), wait in tuple(tracker.waits.items()):
        age_ns = max(0, now_ns - wait.since_ns)
        if room in tracker.rooms:
            yield {
                "room": str(room),
                "peer": tracker.name_of(endpoint),
                "chunk": chunk,
                "layers": list(shape.layers),
                "bytes": shape.bytes_to(wait.pages, sizes.get(endpoint, shape.tp_size)),
                "waiting_for": f"watermark round {wait.round - 1} tail {wait.end}" if wait.end >= 0 else "grant",
                "age_ns": age_ns,
                "requests": 1,
                "asked_age_ns": age_ns,
            }


def _buffers(manager: Any) -> StagingBuffers | None:
    sizes = [buffer.get_size() for buffer in getattr(staging_context(manager), "buffers", None) or ()]
    if not sizes:
        return None
    return {
        "size_bytes": sum(sizes),
        "piece_bytes": max(sizes),
        "pieces": len(sizes),
        "pieces_used": None,
        "pieces_high_water": None,
    }


# ---- peers -----------------------------------------------------------------------------------------------------


def _decode_ranks(manager: Any) -> Iterable[tuple[Any, Any]]:
    """Returns sessions and addresses of the decode ranks that a prefill rank knows."""
    return getattr(manager, "decode_kv_args_table", {}).copy().items()


def _endpoint(info: Any) -> str:
    return f"{info.endpoint}:{info.dst_port}"


def _tp_size(info: Any) -> int:
    return int(getattr(info, "decode_tp_size", 0) or info.dst_attn_tp_size)


def _bootstrap(manager: Any, tracker: Tracker) -> Iterator[Bootstrap]:
    """Yields one row per prefill server that a decode rank knows, with the ranks that it has looked up."""
    for address, info in getattr(manager, "prefill_info_table", {}).copy().items():
        registered: list[RegisteredRank] = [
            {"name": peer.name, "endpoint": endpoint, "incarnation": "", "rank": {}}
            for endpoint, peer in tracker.peers.items()
            if peer.server == address and not peer.lost_ns
        ]
        yield {
            "agent": tracker.name,
            "registry": address,
            "expected": None,
            "sizes": {"dp": info.dp_size, "pp": info.pp_size, "cp": info.attn_cp_size, "tp": info.attn_tp_size},
            "registered": registered,
            "missing": [],
            "text": "",
        }


def _known_peers(manager: Any, tracker: Tracker) -> Iterator[tuple[str, Any, str]]:
    """Yields each peer with its state: a decode rank's by endpoint, the decode ranks of a prefill rank by session."""
    if tracker.shape.role == "decode":
        failures = getattr(manager, "heartbeat_failures", {}).copy()
        for endpoint, peer in tracker.peers.copy().items():
            yield endpoint, peer, "lost" if peer.lost_ns else "suspect" if failures.get(peer.server) else "ready"
        return
    failed = getattr(manager, "failed_sessions", ())
    for session, info in _decode_ranks(manager):
        yield session, info, "lost" if session in failed else "ready"


def _peers(manager: Any, tracker: Tracker) -> Iterator[PeerRow]:
    """Yields a row for each peer; the observer fills in the rooms."""
    make = partial(peer_row, tracker.name, tracker.shape.role, engine_of(manager))
    if tracker.shape.role == "decode":
        now_ns = time.monotonic_ns()
        for endpoint, peer, state in _known_peers(manager, tracker):
            error = f"its server's bootstrap address {peer.server} does not answer" if state == "lost" else None
            yield make(peer.name, f"tcp://{endpoint}", state, max(0, now_ns - peer.answered_ns), error)
        return
    watermarks = getattr(staging_context(manager), "remote_watermarks", {})
    for session, info, state in _known_peers(manager, tracker):
        error = "a transfer to it failed, and SGLang sends it nothing any more" if state == "lost" else None
        endpoint = _endpoint(info)
        row = make(tracker.name_of(endpoint), f"tcp://{endpoint}", state, None, error)
        row["watermark_seen"] = list(watermarks[session]) if session in watermarks else None
        yield row
