"""What the tracker makes of the events of SGLang's rooms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent.contract.admin import LOCK_SUFFIX
from kvctl_agent.integrations.sglang.observe.failure_codes import code_of
from kvctl_agent.integrations.sglang.observe.manager_state import RankShape
from kvctl_agent.integrations.sglang.observe.tracker import SentPart, Tracker, Wait, Writer
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.folded import folded

MS = 1_000_000
PAGE = 4096
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
WRITERS = tuple(Writer(rank, f"10.0.0.1:{rank}", f"prefill-tp{rank}", "10.0.0.1:8998", True) for rank in range(2))

Event = tuple[Any, ...]
"""A method of the tracker and its arguments."""


def tracker(role: Any, directory: Path | None = None, waits: dict[tuple[int, int, str], Wait] | None = None) -> Tracker:
    shape = RankShape(role, PAGE, (0, 4), tp_size=2, heads=4, total_heads=8)
    telemetry = Telemetry("me", role)
    telemetry.collected = []
    return Tracker("me", shape, telemetry, {} if waits is None else waits, directory or Path("/nonexistent"))


def apply(tracker: Tracker, *events: Event) -> None:
    for method, *arguments in events:
        method(tracker, *arguments)


def rows(tracker: Tracker, number: int = 7) -> list[Any]:
    """What an observer makes of a room's records."""
    return list(folded(tracker.telemetry).rooms.detail(number))


def row(tracker: Tracker, number: int = 7) -> Any:
    (found,) = rows(tracker, number)
    return found


def counter(tracker: Tracker, name: str, *labels: str) -> float:
    return folded(tracker.telemetry).metrics.total(name, *labels)


def sent(room: int, first_page: int, at_ns: int, **changes: Any) -> Event:
    part = SentPart(room, first_page, 2, "10.0.0.2:5", 2, "bulk", at_ns - 3, False, at_ns - 2, at_ns - 1)
    return Tracker.part_sent, at_ns, part._replace(**changes)


class TestPrefill:
    def test_a_room_from_its_engine_to_success(self) -> None:
        seen = tracker("prefill")
        apply(
            seen,
            (Tracker.status_changed, 1 * MS, 7, BOOTSTRAPPING),
            (Tracker.begun, 1 * MS, 7, 4),
            (Tracker.accepted, 2 * MS, 7, ("10.0.0.2:5", "10.0.0.2:6")),
            (Tracker.status_changed, 2 * MS, 7, WAITING),
            (Tracker.chunk_ready, 3 * MS, 7, 0, False),
            (Tracker.status_changed, 4 * MS, 7, TRANSFERRING),
            sent(7, 0, 5 * MS),
            (Tracker.chunk_ready, 6 * MS, 7, 2, True),
            sent(7, 2, 8 * MS),
            (Tracker.status_changed, 9 * MS, 7, SUCCESS),
            (Tracker.cleared, 20 * MS, 7),
        )
        room = row(seen)
        assert (room["state"], room["pages"], room["parts"], room["bytes"]) == ("Success", 4, 2, 4 * PAGE)
        assert room["peers"] == ["10.0.0.2:5", "10.0.0.2:6"]
        assert room["paths"] == {"bulk": 2}
        assert room["latency_ns"] == 6 * MS  # from the first chunk to SGLang's success, not to its clean-up
        stages = [(event["stage"], event["chunk"]) for event in room["timeline"] if event["stage"] == "wire"]
        assert stages == [("wire", 0), ("wire", 1)]
        assert [event["stage"] for event in room["timeline"]][-2:] == ["sent", "done"]
        assert counter(seen, "kvctl_part_bytes_total", "bulk") == 4 * PAGE
        assert not seen.rooms

    def test_a_decode_rank_opens_the_room_before_the_engine_begins_it(self) -> None:
        seen = tracker("prefill")
        apply(
            seen,
            (Tracker.accepted, 1 * MS, 7, ("10.0.0.2:5",)),
            (Tracker.status_changed, 1 * MS, 7, WAITING),
            (Tracker.status_changed, 2 * MS, 7, BOOTSTRAPPING),  # of the sender: the higher state stays
        )
        assert row(seen)["state"] == "WaitingForInput"
        assert row(seen)["peers"] == ["10.0.0.2:5"]

    def test_a_wider_decode_instance_gets_a_share_of_the_heads(self) -> None:
        shape = RankShape("prefill", PAGE, (0, 4), tp_size=2, heads=4, total_heads=8)
        assert [shape.bytes_to(1, tp) for tp in (1, 2, 4, 8, 16)] == [PAGE, PAGE, PAGE // 2, PAGE // 4, PAGE // 4]

    def test_a_chunk_that_waited_for_the_ring_has_a_gate_time(self) -> None:
        seen = tracker("prefill")
        apply(
            seen,
            (Tracker.status_changed, 0, 7, WAITING),
            (Tracker.chunk_ready, 1 * MS, 7, 0, True),
            sent(7, 0, 9 * MS, path="staged", gated=True, passed_ns=7 * MS, posted_ns=8 * MS),
        )
        (layers,) = folded(seen.telemetry).stages.rows()
        assert layers["path"] == "staged"
        assert layers["stages"]["gate"]["p50_ns"] == pytest.approx(6 * MS, rel=0.04)
        assert layers["stages"]["queue"]["count"] == 0

    def test_decode_ranks_of_this_host_are_named(self, tmp_path: Path) -> None:
        (tmp_path / f"decode-tp0@b:1{LOCK_SUFFIX}").write_text("1\n10.0.0.2:5")
        seen = tracker("prefill", tmp_path)
        apply(
            seen,
            (Tracker.accepted, 1, 7, ("10.0.0.2:5", "10.0.0.3:5")),
            (Tracker.chunk_ready, 2, 7, 0, True),
            sent(7, 0, 9),
        )
        assert row(seen)["peers"] == ["decode-tp0@b:1", "10.0.0.3:5"]
        peers = [event["peer"] for event in row(seen)["timeline"] if event["stage"] in ("accept", "wire")]
        assert peers == ["decode-tp0@b:1", "10.0.0.3:5", "decode-tp0@b:1"]


class TestFailures:
    def test_the_first_reason_is_the_cause(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            (Tracker.status_changed, 1 * MS, 7, BOOTSTRAPPING),
            (Tracker.writers_known, 1 * MS, 7, WRITERS, False),
            (Tracker.failed, 2 * MS, 7, "NIXL transfer encountered ERR room=7", 1),
            (Tracker.status_changed, 2 * MS, 7, FAILED),
            (Tracker.failed, 3 * MS, 7, "Aborted by AbortReq.", None),
            (Tracker.status_changed, 4 * MS, 7, SUCCESS),  # Failed is final
            (Tracker.cleared, 5 * MS, 7),
        )
        failure = row(seen)["failure"]
        assert (failure["rank"], failure["code"]) == ("prefill-tp1", "KV_TRANSPORT")
        assert failure["text"] == "NIXL transfer encountered ERR room=7"
        assert row(seen)["state"] == "Failed"
        assert counter(seen, "kvctl_room_failures_total") == counter(seen, "kvctl_rooms_finished_total", "Failed") == 1

    def test_a_late_reason_does_not_fail_a_room_that_succeeded(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            (Tracker.status_changed, 1, 7, WAITING),
            (Tracker.status_changed, 2, 7, SUCCESS),
            (Tracker.failed, 3, 7, "late", None),
        )
        assert row(seen)["failure"] is None

    def test_a_room_given_up_without_an_end_has_failed(self) -> None:
        seen = tracker("decode")
        apply(seen, (Tracker.status_changed, 1, 7, WAITING), (Tracker.cleared, 2, 7))
        assert row(seen)["failure"]["code"] == "ABORTED"
        assert row(seen)["state"] == "Failed"

    def test_a_state_other_than_an_opening_one_creates_no_room(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            (Tracker.status_changed, 1, 7, SUCCESS),
            (Tracker.status_changed, 1, 7, FAILED),
            (Tracker.failed, 1, 7, "x", None),
        )
        assert not seen.rooms

    def test_a_number_used_again_is_another_room(self) -> None:
        seen = tracker("decode")
        for start in (0, 10):
            apply(
                seen, (Tracker.status_changed, start + 1, 7, WAITING), (Tracker.status_changed, start + 2, 7, SUCCESS)
            )
            apply(seen, (Tracker.cleared, start + 3, 7))
        assert [found["state"] for found in rows(seen)] == ["Success", "Success"]

    @pytest.mark.parametrize(
        ("reason", "code"),
        [
            ("Request 7 timed out after 300.1s in KVPoll.Bootstrapping", "KV_ROOM_STUCK_BOOTSTRAP"),
            ("Request 7 timed out after 300.1s in KVPoll.WaitingForInput", "KV_ROOM_STUCK_WAITING"),
            ("Lost connection with prefill instance (bootstrap_addr: 127.0.0.1:8998)", "KV_PEER_LOST"),
            ("Failed to get kvcache from prefill instance, it might be dead", "KV_PEER_LOST"),
            (
                "[Staging] Chunk staging allocation permanently failed: chunk exceeds ring buffer total",
                "KV_CHUNK_OVERSIZED",
            ),
            ("Aborted by decode-side abort notification.", "ABORTED"),
            ("something new", "KV_TRANSPORT"),
        ],
    )
    def test_codes(self, reason: str, code: str) -> None:
        assert code_of(reason) == code


class TestDecode:
    def test_a_room_of_numpy_is_the_same_room(self) -> None:
        seen = tracker("decode")
        apply(seen, (Tracker.status_changed, 1, np.int64(7), WAITING), (Tracker.writers_known, 1, 7, WRITERS, False))
        apply(seen, (Tracker.status_changed, 2, 7, SUCCESS), (Tracker.cleared, 3, np.uint64(7)))
        assert (row(seen)["state"], row(seen)["peers"]) == ("Success", ["prefill-tp0", "prefill-tp1"])

    def test_the_cells_of_a_room_are_unknown(self) -> None:
        seen = tracker("decode")
        apply(seen, (Tracker.status_changed, 1, 7, WAITING))
        assert (row(seen)["coverage"], row(seen)["unscattered"]) == (None, None)

    def test_each_writer_adds_its_share(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            (Tracker.status_changed, 1 * MS, 7, BOOTSTRAPPING),
            (Tracker.writers_known, 1 * MS, 7, WRITERS, False),
            (Tracker.status_changed, 1 * MS, 7, WAITING),
            (Tracker.pages_announced, 2 * MS, 7, 4, 32),
            (Tracker.writer_done, 5 * MS, 7, 1),
            (Tracker.writer_done, 5 * MS, 7, 1),  # a repeated message
        )
        assert row(seen)["bytes"] == 2 * PAGE
        assert [writer.name for writer in seen.rooms[7].senders if writer.rank not in seen.rooms[7].done] == [
            "prefill-tp0"
        ]
        apply(
            seen,
            (Tracker.writer_done, 6 * MS, 7, 0),
            (Tracker.status_changed, 6 * MS, 7, SUCCESS),
            (Tracker.cleared, 8 * MS, 7),
        )
        room = row(seen)
        assert (room["bytes"], room["latency_ns"], room["pages"]) == (4 * PAGE, 5 * MS, 4)
        (opened,) = [event for event in room["timeline"] if event["stage"] == "open"]
        assert opened["detail"] == "4 pages to 2 prefill ranks, after a prefix of 32 tokens"

    def test_a_staged_room_ends_when_its_last_chunk_is_in_its_pages(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            (Tracker.status_changed, 1 * MS, 7, WAITING),
            (Tracker.writers_known, 1 * MS, 7, WRITERS, True),
            (Tracker.pages_announced, 1 * MS, 7, 4, 0),
            (Tracker.region_granted, 2 * MS, 7, 0, 4, 17),
            (Tracker.region_granted, 2 * MS, 7, 0, 4, 17),  # every prefill rank asks
            (Tracker.chunk_landed, 3 * MS, 7, 0, 4, 0),
        )
        assert [writer.rank for writer in seen.rooms[7].owing(0)] == [1]
        assert seen.ring_high_water_bytes == 4 * PAGE
        apply(
            seen,
            (Tracker.chunk_landed, 4 * MS, 7, 0, 4, 1),
            (Tracker.writer_done, 4 * MS, 7, 0),
            (Tracker.writer_done, 4 * MS, 7, 1),
            (Tracker.status_changed, 5 * MS, 7, SUCCESS),
            (Tracker.region_freed, 9 * MS, 17),
            (Tracker.cleared, 20 * MS, 7),
        )
        room = row(seen)
        assert (room["bytes"], room["latency_ns"], room["paths"]) == (4 * PAGE, 8 * MS, {"staged": 2})
        assert not seen.regions
        assert counter(seen, "kvctl_ring_grants_total") == 1

    def test_a_region_granted_after_its_chunk_arrived_is_noted(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            (Tracker.status_changed, 1 * MS, 7, WAITING),
            (Tracker.writers_known, 1 * MS, 7, WRITERS, True),
            (Tracker.region_granted, 2 * MS, 7, 0, 4, 17),
            (Tracker.chunk_landed, 3 * MS, 7, 0, 4, 0),
            (Tracker.chunk_landed, 3 * MS, 7, 0, 4, 1),
            (Tracker.region_granted, 4 * MS, 7, 0, 4, 18),  # the second rank's request was late
        )
        grants = [event["detail"] for event in row(seen)["timeline"] if event["stage"] == "grant"]
        assert grants == ["", "again, though all of it had arrived"]
        assert set(seen.regions) == {17, 18}

    def test_a_lost_server_loses_its_ranks_until_they_are_found_again(self) -> None:
        seen = tracker("decode")
        apply(seen, (Tracker.status_changed, 1, 7, WAITING), (Tracker.writers_known, 1, 7, WRITERS, False))
        lost = [(Tracker.server_lost, at_ns, "10.0.0.1:8998") for at_ns in (9, 10)]
        apply(seen, (Tracker.server_answered, 5, "10.0.0.1:8998"), *lost)
        assert counter(seen, "kvctl_peer_lost_total") == 2
        assert {(peer.answered_ns, peer.lost_ns) for peer in seen.peers.values()} == {(5, 9)}
        again = WRITERS[0]._replace(endpoint="10.0.0.1:77")
        apply(seen, (Tracker.status_changed, 10, 8, WAITING), (Tracker.writers_known, 10, 8, (again,), False))
        assert {endpoint: bool(peer.lost_ns) for endpoint, peer in seen.peers.items()} == {
            "10.0.0.1:1": True,
            "10.0.0.1:77": False,
        }

    def test_a_chunk_larger_than_the_ring(self) -> None:
        seen = tracker("decode")
        apply(seen, (Tracker.status_changed, 1, 7, WAITING), (Tracker.region_refused, 2, 7, 0, 100))
        assert seen.refused_largest_bytes == 100 * PAGE
        assert counter(seen, "kvctl_ring_refusals_total") == 1
