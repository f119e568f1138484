"""What the tracker makes of the events of vLLM's requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvctl_agent import room_number
from kvctl_agent.contract.admin import LOCK_SUFFIX
from kvctl_agent.integrations.vllm.observe.tracker import Posted, Server, Shape, Tracker
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.folded import folded

MS = 1_000_000
BLOCK = 4096
PREFILL, DECODE = Server("10.0.0.1", 5600), Server("10.0.0.2", 5601)
NAME = "prefill-tp0@10.0.0.1:5600"

Event = tuple[Any, ...]
"""A method of the tracker and its arguments."""


def tracker(role: Any, directory: Path = Path("/nonexistent"), recomputes: bool = True) -> Tracker:
    telemetry = Telemetry("me", role)
    telemetry.collected = []
    return Tracker("me", Shape(role, BLOCK, 4, recomputes), telemetry, directory)


def apply(tracker: Tracker, *events: Event) -> None:
    for method, *arguments in events:
        method(tracker, *arguments)


def row(tracker: Tracker, transfer: str = "p-1") -> Any:
    """What an observer makes of a room's records."""
    (found,) = folded(tracker.telemetry).rooms.detail(room_number(transfer))
    return found


def stages(tracker: Tracker) -> list[str]:
    return [event["stage"] for event in row(tracker)["timeline"]]


def counter(tracker: Tracker, name: str, *labels: str) -> float:
    return folded(tracker.telemetry).metrics.total(name, *labels)


def texts(tracker: Tracker) -> str:
    return " | ".join(event["text"] for event in folded(tracker.telemetry).recorder.since(None, 100)["events"])


def posted(at_ns: int, request: str = "d-1", path: str = "read", engine: str = "prefill") -> Posted:
    return Posted(request, engine, 0, path, 8, at_ns - MS, at_ns)


READ = (
    (Tracker.arrived, 1 * MS, "decode", "d-1", "p-1", 100),
    (Tracker.connecting, 2 * MS, "prefill", PREFILL, (0,)),
    (Tracker.allocated, 3 * MS, "d-1", 4, 0, "prefill", PREFILL),
    (Tracker.connected, 5 * MS, PREFILL, ((0, 0),), 3 * MS),
    (Tracker.posted, 6 * MS, posted(6 * MS)),
)


class TestDecode:
    def test_engines_that_start_again_do_not_fill_memory(self) -> None:
        seen = tracker("decode")
        for number in range(5000):
            server = PREFILL._replace(port=number)
            apply(seen, (Tracker.connecting, 1 * MS, f"engine-{number}", server, (0,)))
            apply(seen, (Tracker.allocated, 1 * MS, "d-1", 4, 0, f"engine-{number}", server))
        assert len(seen._engines) == len(seen.peers) == 4096
        assert seen._engines["engine-4999"].port == 4999

    def test_a_handshake_that_fails_is_the_cause_of_the_rooms_that_wait(self) -> None:
        seen = tracker("decode")
        apply(seen, *READ[:3])
        text = "handshake failed with 10.0.0.1:5600: no answer within 5 s"
        apply(
            seen,
            (Tracker.reason, 8 * MS, None, "KV_HANDSHAKE_FAILED", text, "prefill"),
            (Tracker.reason, 8 * MS, "d-1", "KV_HANDSHAKE_FAILED", text),
            (Tracker.received, 9 * MS, "d-1", True),
        )
        failure = row(seen)["failure"]
        assert (failure["code"], failure["rank"]) == ("KV_HANDSHAKE_FAILED", "me")
        assert failure["text"].startswith(text)
        assert failure["text"].endswith("the prompt is computed here again")
        assert counter(seen, "kvctl_recomputed_prompts_total", "load-failed") == 1
        assert (seen.peers[NAME].state, seen.peers[NAME].error) == ("connecting", text)

    def test_a_request_that_fails_is_not_computed_again_with_the_other_policy(self) -> None:
        seen = tracker("decode", recomputes=False)
        apply(seen, *READ, (Tracker.received, 9 * MS, "d-1", True))
        assert row(seen)["failure"]["text"] == "vLLM gave no reason"
        assert counter(seen, "kvctl_recomputed_prompts_total", "load-failed") == 0

    def test_an_abort_in_flight_says_so(self) -> None:
        seen = tracker("decode")
        apply(seen, *READ, (Tracker.ended, 9 * MS, "d-1", True))
        failure = row(seen)["failure"]
        assert failure["code"] == "ABORTED"
        assert failure["text"] == "aborted by vLLM in Transferring, while 1 transfers were in flight"
        apply(seen, (Tracker.moved, 11 * MS, posted(6 * MS), BLOCK, MS), (Tracker.received, 12 * MS, "d-1", False))
        assert row(seen)["bytes"] == 0

    def test_two_requests_of_one_transfer_are_one_room(self) -> None:
        seen = tracker("decode")
        apply(seen, READ[0], (Tracker.arrived, 2 * MS, "decode", "d-2", "p-1", 100))
        assert list(seen.rooms) == ["d-1"]
        assert "another request with the id p-1 is not shown: d-2" in texts(seen)


HELD = ((Tracker.arrived, 1 * MS, "prefill", "p-1", "p-1", 100), (Tracker.held, 4 * MS, "p-1", 4, 30.0))


class TestPrefill:
    def test_a_room_that_decode_reads(self, tmp_path: Path) -> None:
        (tmp_path / f"decode-tp0@b:1{LOCK_SUFFIX}").write_text("17\nagent\n")
        seen = tracker("prefill", tmp_path)
        apply(seen, *HELD)
        assert (row(seen)["state"], row(seen)["pages"], row(seen)["peers"]) == ("Bootstrapping", 4, [])
        apply(seen, (Tracker.claimed, 9 * MS, "p-1", "agent"), (Tracker.claimed, 14 * MS, "p-1", "agent"))
        assert (row(seen)["state"], row(seen)["peers"]) == ("WaitingForInput", ["decode-tp0@b:1"])
        apply(seen, (Tracker.read, 20 * MS, "p-1", "agent", 1), (Tracker.released, 20 * MS, "p-1"))
        assert (row(seen)["state"], row(seen)["latency_ns"]) == ("Success", 16 * MS)
        assert stages(seen)[-5:] == ["finish", "accept", "renew", "read", "sent"]

    @pytest.mark.parametrize(
        ("before", "end"),
        [
            ((), "transferred"),
            (((Tracker.claimed, 9 * MS, "p-1", "agent"),), "transferred by agent"),
            (((Tracker.read, 9 * MS, "p-1", "agent", 2),), "transferred by agent"),
            (
                ((Tracker.posted, 9 * MS, posted(9 * MS, "p-1", "write", "decode")),),
                "transferred, while 1 writes were in flight",
            ),
        ],
    )
    def test_blocks_that_are_released_before_all_have_them_had_an_expired_lease(self, before: Any, end: str) -> None:
        seen = tracker("prefill")
        apply(seen, *HELD, *before, (Tracker.released, 31_000 * MS, "p-1"))
        failure = row(seen)["failure"]
        assert failure["code"] == "KV_HOLD_EXPIRED"
        assert failure["text"] == f"the lease of its 4 blocks ended before they were {end}"

    def test_a_write_that_failed_is_the_cause_and_not_its_lease(self) -> None:
        seen = tracker("prefill")
        write = posted(9 * MS, "p-1", "write", "decode")
        reason = (Tracker.reason, 10 * MS, "p-1", "KV_TRANSPORT", "transfer failed: state ERR")
        apply(seen, *HELD, (Tracker.posted, 9 * MS, write), reason, (Tracker.released, 31_000 * MS, "p-1"))
        assert row(seen)["failure"]["code"] == "KV_TRANSPORT"

    def test_a_request_of_the_other_role_is_not_shown(self) -> None:
        seen = tracker("prefill")
        apply(seen, READ[0])
        assert not seen.rooms

    def test_events_of_unknown_requests_change_nothing(self) -> None:
        seen = tracker("prefill")
        apply(
            seen,
            (Tracker.held, MS, "x", 4, 30.0),
            (Tracker.claimed, MS, "x", "agent"),
            (Tracker.read, MS, "x", "agent", 1),
            (Tracker.released, MS, "x"),
            (Tracker.received, MS, "x", True),
            (Tracker.ended, MS, "x", True),
            (Tracker.written, MS, "x", "agent", 1),
            (Tracker.allocated, MS, "x", 1, 0, "decode", DECODE),
        )
        assert not seen.rooms
        assert counter(seen, "kvctl_rooms_opened_total") == 0


def test_registrations_of_requests_that_never_come_are_few() -> None:
    seen = tracker("prefill")
    for number in range(2000):
        seen.registered(MS, f"r-{number}", "agent", DECODE)
    assert len(seen._registered) == 1024
