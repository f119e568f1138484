"""Predictions of `cost`, from the latest rooms."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import pytest

from kvctl_agent.observer.documents import PeerCost
from kvctl_agent.observer.transfer_costs import transfer_costs
from kvctl_agent.observer.transfer_times import Ahead, TransferFit

MS = 1_000_000


def peer(name: str, **given: Any) -> PeerCost:
    row: PeerCost = {
        "peer": name,
        "incarnation": "1",
        "rank": None,
        "state": "ready",
        "reason": None,
        "page_tokens": 16,
        "page_bytes": 1000,
        "own_page_bytes": 500,
    }
    return {**row, **given}  # type: ignore[typeddict-item]


FIT = TransferFit(2 * MS, MS / 16, 1.0, 0.1, 9, 0, "staged")


def fold(records: list[Any], tokens: dict[int, int], fit: TransferFit | None = FIT) -> Any:
    listed: list[None] = []

    def active() -> list[Any]:
        listed.append(None)
        return records

    transfers = Namespace(
        in_transfer=lambda: tokens, fit=lambda name, now_ns: fit, ahead=lambda now_ns: Ahead(tokens=32)
    )
    return Namespace(transfers=transfers, rooms=Namespace(active=active), listed=listed)


def record(room: int, peers: list[str], planned: int = 0, sent: int = 0) -> Any:
    return Namespace(room=room, peers=peers, planned=planned, sent=sent)


def test_rooms_are_listed_once_for_all_peers() -> None:
    """The work grows with the peers and the rooms, not with their product."""
    records = [record(room, [f"decode-{room % 2}"]) for room in range(5)]
    known = fold(records, dict.fromkeys(range(4), 16))
    _, rows = transfer_costs("prefill-0", [peer(f"decode-{number}") for number in range(3)], known, 100, 1)
    assert {row["peer"]: row["rooms"] for row in rows} == {"decode-0": 2, "decode-1": 2, "decode-2": 0}
    assert len(known.listed) == 1


@pytest.mark.parametrize(("tokens", "alone_ms", "pages"), [(16, 3, 1), (24, 3.5, 2), (128, 10, 8)])
def test_a_prompt_costs_a_fixed_time_and_that_of_its_tokens(tokens: int, alone_ms: float, pages: int) -> None:
    _, (row,) = transfer_costs("prefill-0", [peer("decode-0")], fold([], {}), tokens, 1)
    assert (row["alone_ns"], row["predicted_ns"]) == (alone_ms * MS, (alone_ms + 2) * MS)
    assert (row["bytes"], row["bytes_per_token"], row["basis"], row["path"]) == (
        pages * 1000,
        1000 / 16,
        "rooms",
        "staged",
    )
    assert (row["fixed_ns"], row["bytes_per_s"]) == (2 * MS, 1000 * 1000)


def test_bytes_of_rooms_count_as_far_as_they_are_not_sent() -> None:
    rooms = [record(1, ["decode-0"], planned=4, sent=1), record(2, ["decode-0"])]
    _, (row,) = transfer_costs("prefill-0", [peer("decode-0")], fold(rooms, {1: 160, 2: 160}), 16, 1)
    assert (row["rooms"], row["queued_bytes"]) == (2, round(10 * 500 * 0.75))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "no room was transferred to it yet"),
        ({"reason": "decode-0 is lost", "state": "lost"}, "decode-0 is lost"),
        ({"page_tokens": 0, "page_bytes": None}, "no room was transferred to it yet"),
    ],
    ids=["no room", "lost", "not connected yet"],
)
def test_without_costs_there_is_a_reason(given: dict[str, Any], reason: str) -> None:
    _, (row,) = transfer_costs("prefill-0", [peer("decode-0", **given)], fold([], {}, None), 100, 1)
    assert (row["alone_ns"], row["predicted_ns"]) == (None, None)
    assert reason in (row["reason"] or "")
