"""What the tracker makes of the events of SGLang's rooms."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvctl_agent.integrations.sglang.observe import events as ev
from kvctl_agent.integrations.sglang.observe.failure_codes import code_of
from kvctl_agent.integrations.sglang.observe.tracker import RankShape, Tracker
from kvctl_agent.telemetry.hub import Telemetry

MS = 1_000_000
PAGE = 4096
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
WRITERS = tuple(ev.Writer(rank, f"10.0.0.1:{rank}", f"prefill-tp{rank}", "10.0.0.1:8998", True) for rank in range(2))


@pytest.fixture
def telemetry(request: Any) -> Telemetry:
    return Telemetry("me", request.param, history=8, timeline_events=64, recorder_events=64)


def tracker(role: Any) -> Tracker:
    telemetry = Telemetry("me", role, history=8, timeline_events=64, recorder_events=64)
    return Tracker("me", RankShape(role, PAGE, (0, 4), tp_size=2, heads=4, total_heads=8), telemetry)


def apply(tracker: Tracker, *events: ev.Event) -> None:
    for event in events:
        tracker.apply(event)


def row(tracker: Tracker, number: int = 7) -> Any:
    (found,) = tracker.telemetry.rooms.detail(number)
    return found


def counter(tracker: Tracker, name: str, *labels: str) -> float:
    return tracker.telemetry.metrics.total(name, *labels)


def sent(room: int, first_page: int, at_ns: int, **changes: Any) -> ev.PartSent:
    part = ev.PartSent(at_ns, room, first_page, 2, "10.0.0.2:5", 2, "bulk", at_ns - 3, False, at_ns - 2, at_ns - 1)
    return replace(part, **changes)


class TestPrefill:
    def test_a_room_from_its_engine_to_success(self) -> None:
        seen = tracker("prefill")
        apply(
            seen,
            ev.StatusChanged(1 * MS, 7, BOOTSTRAPPING),
            ev.Begun(1 * MS, 7, 4),
            ev.Accepted(2 * MS, 7, ("10.0.0.2:5", "10.0.0.2:6")),
            ev.StatusChanged(2 * MS, 7, WAITING),
            ev.ChunkReady(3 * MS, 7, 0, 2, False),
            ev.StatusChanged(4 * MS, 7, TRANSFERRING),
            sent(7, 0, 5 * MS),
            ev.ChunkReady(6 * MS, 7, 2, 2, True),
            sent(7, 2, 8 * MS),
            ev.StatusChanged(9 * MS, 7, SUCCESS),
            ev.Cleared(20 * MS, 7),
        )
        room = row(seen)
        assert (room["state"], room["pages"], room["parts"], room["bytes"]) == ("Success", 4, 2, 4 * PAGE)
        assert room["peers"] == ["10.0.0.2:5", "10.0.0.2:6"]
        assert room["paths"] == {"bulk": 2}
        assert room["latency_ns"] == 6 * MS  # from the first chunk to SGLang's success, not to its clean-up
        stages = [(event["stage"], event["chunk"]) for event in room["timeline"] if event["stage"] == "wire"]
        assert stages == [("wire", 0), ("wire", 1)]
        assert counter(seen, "kvctl_part_bytes_total", "bulk") == 4 * PAGE
        assert not seen.rooms

    def test_a_decode_rank_opens_the_room_before_the_engine_begins_it(self) -> None:
        seen = tracker("prefill")
        apply(
            seen,
            ev.Accepted(1 * MS, 7, ("10.0.0.2:5",)),
            ev.StatusChanged(1 * MS, 7, WAITING),
            ev.StatusChanged(2 * MS, 7, BOOTSTRAPPING),  # of the sender: the higher state stays
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
            ev.StatusChanged(0, 7, WAITING),
            ev.ChunkReady(1 * MS, 7, 0, 2, True),
            sent(7, 0, 9 * MS, path="staged", gated=True, passed_ns=7 * MS, posted_ns=8 * MS),
        )
        (layers,) = seen.telemetry.stages.rows()
        assert layers["path"] == "staged"
        assert layers["stages"]["gate"]["p50_ns"] == pytest.approx(6 * MS, rel=0.04)
        assert layers["stages"]["queue"]["count"] == 0


class TestFailures:
    def test_the_first_reason_is_the_cause(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            ev.StatusChanged(1 * MS, 7, BOOTSTRAPPING),
            ev.WritersKnown(1 * MS, 7, WRITERS, False),
            ev.Failed(2 * MS, 7, "NIXL transfer encountered ERR room=7", 1),
            ev.StatusChanged(2 * MS, 7, FAILED),
            ev.Failed(3 * MS, 7, "Aborted by AbortReq.", None),
            ev.StatusChanged(4 * MS, 7, SUCCESS),  # Failed is final
            ev.Cleared(5 * MS, 7),
        )
        failure = row(seen)["failure"]
        assert (failure["rank"], failure["code"]) == ("prefill-tp1", "KV_TRANSPORT")
        assert failure["text"] == "NIXL transfer encountered ERR room=7"
        assert row(seen)["state"] == "Failed"
        assert counter(seen, "kvctl_room_failures_total") == counter(seen, "kvctl_rooms_finished_total", "Failed") == 1

    def test_a_late_reason_does_not_fail_a_room_that_succeeded(self) -> None:
        seen = tracker("decode")
        apply(seen, ev.StatusChanged(1, 7, WAITING), ev.StatusChanged(2, 7, SUCCESS), ev.Failed(3, 7, "late", None))
        assert row(seen)["failure"] is None

    def test_a_room_given_up_without_an_end_has_failed(self) -> None:
        seen = tracker("decode")
        apply(seen, ev.StatusChanged(1, 7, WAITING), ev.Cleared(2, 7))
        assert row(seen)["failure"]["code"] == "ABORTED"
        assert row(seen)["state"] == "Failed"

    def test_a_state_other_than_an_opening_one_creates_no_room(self) -> None:
        seen = tracker("decode")
        apply(seen, ev.StatusChanged(1, 7, SUCCESS), ev.StatusChanged(1, 7, FAILED), ev.Failed(1, 7, "x", None))
        assert not seen.rooms

    def test_a_number_used_again_is_another_room(self) -> None:
        seen = tracker("decode")
        for start in (0, 10):
            apply(seen, ev.StatusChanged(start + 1, 7, WAITING), ev.StatusChanged(start + 2, 7, SUCCESS))
            apply(seen, ev.Cleared(start + 3, 7))
        assert [found["state"] for found in seen.telemetry.rooms.detail(7)] == ["Success", "Success"]

    def test_rooms_whose_end_was_dropped_are_ended(self) -> None:
        seen = tracker("decode")
        apply(seen, ev.StatusChanged(1, 7, WAITING), ev.StatusChanged(1, 8, WAITING))
        seen.forget_except({8}, 5)
        assert set(seen.rooms) == {8}

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
    def test_each_writer_adds_its_share(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            ev.StatusChanged(1 * MS, 7, BOOTSTRAPPING),
            ev.WritersKnown(1 * MS, 7, WRITERS, False),
            ev.StatusChanged(1 * MS, 7, WAITING),
            ev.PagesAnnounced(2 * MS, 7, 4, 32),
            ev.WriterDone(5 * MS, 7, 1),
            ev.WriterDone(5 * MS, 7, 1),  # a repeated message
        )
        assert row(seen)["bytes"] == 2 * PAGE
        assert [writer.name for writer in seen.rooms[7].senders if writer.rank not in seen.rooms[7].done] == [
            "prefill-tp0"
        ]
        apply(seen, ev.WriterDone(6 * MS, 7, 0), ev.StatusChanged(6 * MS, 7, SUCCESS), ev.Cleared(8 * MS, 7))
        room = row(seen)
        assert (room["bytes"], room["latency_ns"], room["pages"]) == (4 * PAGE, 5 * MS, 4)
        (opened,) = [event for event in room["timeline"] if event["stage"] == "open"]
        assert opened["detail"] == "4 pages to 2 prefill ranks, after a prefix of 32 tokens"

    def test_a_staged_room_ends_when_its_last_chunk_is_in_its_pages(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            ev.StatusChanged(1 * MS, 7, WAITING),
            ev.WritersKnown(1 * MS, 7, WRITERS, True),
            ev.PagesAnnounced(1 * MS, 7, 4, 0),
            ev.RegionGranted(2 * MS, 7, 0, 4, 17),
            ev.RegionGranted(2 * MS, 7, 0, 4, 17),  # every prefill rank asks
            ev.ChunkLanded(3 * MS, 7, 0, 4, 0),
        )
        assert [writer.rank for writer in seen.rooms[7].owing(0)] == [1]
        assert seen.ring_high_water_bytes == 4 * PAGE
        apply(
            seen,
            ev.ChunkLanded(4 * MS, 7, 0, 4, 1),
            ev.WriterDone(4 * MS, 7, 0),
            ev.WriterDone(4 * MS, 7, 1),
            ev.StatusChanged(5 * MS, 7, SUCCESS),
            ev.RegionFreed(9 * MS, 17),
            ev.Cleared(20 * MS, 7),
        )
        room = row(seen)
        assert (room["bytes"], room["latency_ns"], room["paths"]) == (4 * PAGE, 8 * MS, {"staged": 2})
        assert not seen.regions
        assert counter(seen, "kvctl_ring_grants_total") == 1

    def test_a_region_granted_after_its_chunk_arrived_is_noted(self) -> None:
        seen = tracker("decode")
        apply(
            seen,
            ev.StatusChanged(1 * MS, 7, WAITING),
            ev.WritersKnown(1 * MS, 7, WRITERS, True),
            ev.RegionGranted(2 * MS, 7, 0, 4, 17),
            ev.ChunkLanded(3 * MS, 7, 0, 4, 0),
            ev.ChunkLanded(3 * MS, 7, 0, 4, 1),
            ev.RegionGranted(4 * MS, 7, 0, 4, 18),  # the second rank's request was late
        )
        grants = [event["detail"] for event in row(seen)["timeline"] if event["stage"] == "grant"]
        assert grants == ["", "again, though all of it had arrived"]
        assert set(seen.regions) == {17, 18}

    def test_a_lost_server_loses_its_ranks_until_they_are_found_again(self) -> None:
        seen = tracker("decode")
        apply(seen, ev.StatusChanged(1, 7, WAITING), ev.WritersKnown(1, 7, WRITERS, False))
        apply(seen, ev.ServerAnswered(5, "10.0.0.1:8998"), ev.ServerLost(9, "10.0.0.1:8998"))
        assert {(peer.answered_ns, peer.lost_ns) for peer in seen.peers.values()} == {(5, 9)}
        again = WRITERS[0]._replace(endpoint="10.0.0.1:77")
        apply(seen, ev.StatusChanged(10, 8, WAITING), ev.WritersKnown(10, 8, (again,), False))
        assert {endpoint: bool(peer.lost_ns) for endpoint, peer in seen.peers.items()} == {
            "10.0.0.1:1": True,
            "10.0.0.1:77": False,
        }

    def test_a_chunk_larger_than_the_ring(self) -> None:
        seen = tracker("decode")
        apply(seen, ev.StatusChanged(1, 7, WAITING), ev.RegionRefused(2, 7, 0, 100))
        assert seen.refused_largest_bytes == 100 * PAGE
        assert counter(seen, "kvctl_ring_refusals_total") == 1
