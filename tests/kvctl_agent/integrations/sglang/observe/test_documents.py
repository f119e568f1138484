"""Rows about an observed rank, from its events and the state that SGLang published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.integrations.sglang.observe.documents import builders
from kvctl_agent.integrations.sglang.observe.tracker import Tracker
from kvctl_agent.observer import documents as doc
from kvctl_agent.telemetry.region import Document, MemoryReader
from tests.kvctl_agent.integrations.sglang.observe.test_tracker import (
    FAILED,
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
        vars(self).update(attributes)


class Seen:
    """The documents of a rank, as an observer reads them."""

    def __init__(self, role: Any, directory: Path, manager: Any, *events: Event) -> None:
        self.tracker = tracker(role, directory)
        apply(self.tracker, *events)
        self._publisher = DocumentPublisher(self.tracker.telemetry.region, builders(manager, self.tracker))
        self._documents = doc.RegionDocuments(MemoryReader(self.tracker.telemetry.region))

    def read(self, document: Document, kind: Any = doc.Rows) -> Any:
        self._publisher.publish_all()
        return self._documents.read(document, kind)


def decode_rank(port: int, tp_size: int) -> Any:
    return SimpleNamespace(endpoint="10.0.0.2", dst_port=port, decode_tp_size=tp_size)


def test_prefill_knows_its_decode_ranks_and_their_watermarks(tmp_path: Path) -> None:
    manager = NixlKVManager(
        decode_kv_args_table={"a": decode_rank(5, tp_size=1), "b": decode_rank(6, tp_size=1)},
        failed_sessions={"b"},
    )
    seen = Seen("prefill", tmp_path, manager, (Tracker.accepted, 1, 7, [DECODE]))
    ready, lost = seen.read(Document.PEERS).rows
    assert (ready["peer"], ready["state"], ready["lane"]) == (DECODE, "ready", "nixl")
    assert lost["state"] == "lost"
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
