"""Rows about an observed rank, from its events and the state that SGLang published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.contract.admin import LOCK_SUFFIX
from kvctl_agent.integrations.sglang.observe.documents import builders
from kvctl_agent.integrations.sglang.observe.tracker import Tracker, Wait
from kvctl_agent.observer import documents as doc
from kvctl_agent.telemetry.region import Document, MemoryReader
from tests.kvctl_agent.integrations.sglang.observe.test_tracker import (
    FAILED,
    PAGE,
    WAITING,
    WRITERS,
    Event,
    apply,
    tracker,
)

DECODE = "10.0.0.2:5"


class NixlKVManager:
    """The attributes of SGLang's manager that the documents need."""

    def __init__(self, **attributes: Any) -> None:
        self._staging_ctx: Any = None
        vars(self).update(attributes)


class Seen:
    """The documents of a rank, as an observer reads them."""

    def __init__(self, role: Any, directory: Path, manager: Any, *events: Event, waits: Any = None) -> None:
        self.tracker = tracker(role, directory, waits)
        apply(self.tracker, *events)
        self._publisher = DocumentPublisher(self.tracker.telemetry.region, builders(manager, self.tracker))
        self._documents = doc.RegionDocuments(MemoryReader(self.tracker.telemetry.region))

    def read(self, document: Document, kind: Any = doc.Rows) -> Any:
        self._publisher.publish_all()
        return self._documents.read(document, kind)


def ring(*allocations: tuple[int, int, int, int], uncopied: list[int]) -> NixlKVManager:
    allocator = SimpleNamespace(
        total_size=16 * PAGE,
        head=12 * PAGE,
        round=1,
        watermark_round=1,
        watermark_tail=8 * PAGE,
        allocations={serial: region for serial, *region in allocations},
    )
    receiver = SimpleNamespace(chunk_staging_infos=[(serial, 0) for serial in uncopied])
    return NixlKVManager(_staging_ctx=SimpleNamespace(allocator=allocator, room_receivers={7: receiver}))


def decode_rank(port: int, tp_size: int) -> Any:
    return SimpleNamespace(endpoint="10.0.0.2", dst_port=port, decode_tp_size=tp_size)


def test_regions_of_a_ring_name_the_writers_that_owe_them(tmp_path: Path) -> None:
    seen = Seen(
        "decode",
        tmp_path,
        ring((18, 4 * PAGE, 4 * PAGE, 1), (17, 0, 4 * PAGE, 1), (19, 8 * PAGE, 4 * PAGE, 1), uncopied=[18]),
        (Tracker.status_changed, 1, 7, WAITING),
        (Tracker.writers_known, 1, 7, WRITERS, True),
        (Tracker.region_granted, 2, 7, 0, 4, 17),
        (Tracker.region_granted, 3, 7, 1, 4, 18),
        *((Tracker.chunk_landed, 4, 7, 0, 4, rank) for rank in (0, 1)),
        (Tracker.chunk_landed, 5, 7, 1, 4, 0),
    )
    found = seen.read(Document.STAGING, doc.Ring)
    copied, owed, unknown = found.rows
    assert (copied["serial"], copied["state"], copied["writer"]) == (17, "landed", "")
    assert copied["age_ns"] > owed["age_ns"] > unknown["age_ns"] == 0
    assert (owed["serial"], owed["state"], owed["writer"], owed["chunk"]) == (18, "granted", "prefill-tp1", 1)
    assert (unknown["room"], unknown["room_state"], unknown["state"]) == ("", "gone", "landed")
    assert found.ring is not None
    assert (found.ring["used_bytes"], found.ring["high_water_bytes"]) == (12 * PAGE, 8 * PAGE)
    assert found.ring["watermark"] == {"round": 1, "tail": 8 * PAGE, "age_ns": 0}
    use = seen.read(Document.STATE, doc.State).ring
    assert (use["used_bytes"], use["high_water_bytes"], use["live"]) == (12 * PAGE, 8 * PAGE, 3)


def test_a_region_granted_once_more_for_a_chunk_that_has_arrived_is_never_copied(tmp_path: Path) -> None:
    landed = [(Tracker.chunk_landed, 4, 7, 0, 4, rank) for rank in (0, 1)]
    seen = Seen(
        "decode",
        tmp_path,
        ring((17, 0, 4 * PAGE, 0), uncopied=[17]),
        (Tracker.status_changed, 1, 7, WAITING),
        (Tracker.writers_known, 1, 7, WRITERS, True),
        *landed,
        (Tracker.region_granted, 5, 7, 0, 4, 17),
    )
    assert [(region["state"], region["writer"]) for region in seen.read(Document.STAGING, doc.Ring).rows] == [
        ("granted", "")
    ]


def test_a_rank_without_a_ring_has_none(tmp_path: Path) -> None:
    for role in ("prefill", "decode"):
        seen = Seen(role, tmp_path, NixlKVManager())
        state = seen.read(Document.STATE, doc.State)
        assert (state.state, state.accepting, state.ring, state.buffers) == ("running", True, None, None)
        assert seen.read(Document.STAGING, doc.Ring).ring is None


def test_gated_parts_are_those_that_wait(tmp_path: Path) -> None:
    (tmp_path / f"decode-tp0@b:1{LOCK_SUFFIX}").write_text(f"1\n{DECODE}")
    buffers = [SimpleNamespace(get_size=lambda size=size: size) for size in (10, np.int64(30))]
    manager = NixlKVManager(
        _staging_ctx=SimpleNamespace(buffers=buffers), decode_kv_args_table={"s": decode_rank(5, tp_size=4)}
    )
    waits = {
        (7, 0, DECODE): Wait(2, 2, 0, -1),
        (7, 1, "10.0.0.3:5"): Wait(3, 2, 2, 64),
        (99, 1, DECODE): Wait(3, 2, 2, 64),  # of a room that is not known
    }
    seen = Seen("prefill", tmp_path, manager, (Tracker.status_changed, 1, 7, WAITING), waits=waits)
    first, second = seen.read(Document.STAGING).rows
    assert (first["peer"], first["waiting_for"], first["bytes"]) == ("decode-tp0@b:1", "grant", PAGE)
    assert (second["peer"], second["waiting_for"]) == ("10.0.0.3:5", "watermark round 1 tail 64")
    assert second["bytes"] == 2 * PAGE
    assert first["age_ns"] == first["asked_age_ns"] > 0
    found = seen.read(Document.STATE, doc.State).buffers
    assert (found["size_bytes"], found["piece_bytes"], found["pieces"]) == (40, 30, 2)


def test_prefill_knows_its_decode_ranks_and_their_watermarks(tmp_path: Path) -> None:
    manager = NixlKVManager(
        decode_kv_args_table={"a": decode_rank(5, tp_size=1), "b": decode_rank(6, tp_size=1)},
        failed_sessions={"b"},
        _staging_ctx=SimpleNamespace(remote_watermarks={"a": (2, 64)}),
    )
    seen = Seen("prefill", tmp_path, manager, (Tracker.accepted, 1, 7, [DECODE]))
    ready, lost = seen.read(Document.PEERS).rows
    assert (ready["peer"], ready["state"], ready["watermark_seen"], ready["lane"]) == (DECODE, "ready", [2, 64], "nixl")
    assert (lost["state"], lost["watermark_seen"]) == ("lost", None)
    assert lost["last_error"] == "a transfer to it failed, and SGLang sends it nothing any more"
    assert seen.read(Document.STATE, doc.State).peers == {"ready": 1, "lost": 1}
    assert [row["state"] for row in seen.read(Document.COSTS).rows] == ["ready", "lost"]


def test_decode_knows_prefill_ranks_by_their_servers(tmp_path: Path) -> None:
    server = WRITERS[0].server
    sizes = SimpleNamespace(dp_size=1, pp_size=1, attn_cp_size=1, attn_tp_size=2)
    manager = NixlKVManager(prefill_info_table={server: sizes, "dead:1": sizes}, heartbeat_failures={server: 1})
    known = (Tracker.writers_known, 1, 7, WRITERS, False)
    seen = Seen("decode", tmp_path, manager, (Tracker.status_changed, 1, 7, WAITING), known)
    rows = seen.read(Document.PEERS).rows
    assert [(row["peer"], row["state"]) for row in rows] == [("prefill-tp0", "suspect"), ("prefill-tp1", "suspect")]
    assert all(row["last_heard_ns"] > 0 for row in rows)
    first, second = seen.read(Document.BOOTSTRAP).rows
    assert (first["registry"], first["sizes"]) == (server, {"dp": 1, "pp": 1, "cp": 1, "tp": 2})
    assert [rank["name"] for rank in first["registered"]] == ["prefill-tp0", "prefill-tp1"]
    assert second["registered"] == []


def test_a_room_of_decode_misses_the_writers_that_have_not_reported(tmp_path: Path) -> None:
    seen = Seen(
        "decode",
        tmp_path,
        NixlKVManager(),
        (Tracker.status_changed, 1, 7, WAITING),
        (Tracker.writers_known, 1, 7, WRITERS, False),
        (Tracker.writer_done, 2, 7, 0),
    )
    assert [(row["room"], row["missing"]) for row in seen.read(Document.ROOMS).rows] == [("7", ["prefill-tp1"])]
    apply(seen.tracker, (Tracker.status_changed, 3, 7, FAILED))
    assert seen.read(Document.ROOMS).rows == []


def test_rooms_and_peers_may_come_while_a_document_is_built(tmp_path: Path) -> None:
    opened = [(Tracker.status_changed, 1, room, WAITING) for room in range(3)]
    seen = tracker("decode", tmp_path)
    apply(seen, *opened, (Tracker.writers_known, 1, 7, WRITERS, False))
    build = builders(NixlKVManager(), seen)
    rooms, peers = build[Document.ROOMS](), build[Document.PEERS]()
    for pieces in (rooms, peers):
        assert next(pieces) == {}
        next(pieces)
    again = WRITERS[0]._replace(endpoint="10.0.0.1:77", name="prefill-tp9")
    apply(seen, (Tracker.status_changed, 2, 9, WAITING), (Tracker.writers_known, 2, 9, (again,), False))
    assert (len(list(rooms)), len(list(peers))) == (2, 1)
