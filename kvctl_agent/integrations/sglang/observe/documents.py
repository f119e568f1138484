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

from kvctl_agent.contract.snapshots import Bootstrap, PeerRow, RegisteredRank
from kvctl_agent.integrations.observe import documents
from kvctl_agent.integrations.observe.documents import peer_row
from kvctl_agent.integrations.sglang.observe.manager_state import engine_of
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.observer.documents import Builder, Diagnosis
from kvctl_agent.telemetry.region import Document


def builders(manager: Any, tracker: Tracker) -> dict[Document, Builder]:
    """Returns the builder of each document of one of SGLang's CommonKVManagers that changes."""
    state, peers = partial(_state, manager, tracker), partial(_peers, manager, tracker)
    bootstrap = {Document.BOOTSTRAP: partial(_bootstrap, manager, tracker)}
    return documents.builders("SGLang", state, partial(_rooms, tracker), peers, bootstrap)


def _state(manager: Any, tracker: Tracker) -> Iterator[Mapping[str, Any]]:
    peers = Counter(state for _, _, state in _known_peers(manager, tracker))
    yield {"state": "running", "accepting": True, "peers": dict(peers)}


# ---- rooms -----------------------------------------------------------------------------------------------------


def _rooms(tracker: Tracker) -> Iterator[Diagnosis]:
    """Yields which writers have not reported the end of each active room of a decode rank."""
    for number, room in tracker.rooms.copy().items():
        if tracker.shape.role == "decode" and not room.record.state_now.finished:
            missing = [writer.name for writer in room.senders if writer.rank not in room.done]
            yield {"room": str(number), "nonce": "0", "missing": missing, "owed": {}, "owed_parts": []}


# ---- peers -----------------------------------------------------------------------------------------------------


def _decode_ranks(manager: Any) -> Iterable[tuple[Any, Any]]:
    """Returns sessions and addresses of the decode ranks that a prefill rank knows."""
    return getattr(manager, "decode_kv_args_table", {}).copy().items()


def _endpoint(info: Any) -> str:
    return f"{info.endpoint}:{info.dst_port}"


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
    for _, info, state in _known_peers(manager, tracker):
        error = "a transfer to it failed, and SGLang sends it nothing any more" if state == "lost" else None
        endpoint = _endpoint(info)
        yield make(tracker.name_of(endpoint), f"tcp://{endpoint}", state, None, error)
