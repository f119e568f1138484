"""Documents of real agents: what they publish in their regions says what their components say."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl_agent.admin.documents import builders
from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.contract.snapshots import Bootstrap, ConfigRow, GatedPart, PeerRow
from kvctl_agent.observer.documents import (
    Diagnosis,
    Identity,
    PeerCost,
    RegionDocuments,
    Ring,
    Rows,
    State,
)
from kvctl_agent.observer.observed_rank import ObservedRank
from kvctl_agent.observer.process_facts import process_facts
from kvctl_agent.telemetry.region import Document, MemoryReader
from tests.support.folded import region_of
from tests.support.polling import until

S = 1_000_000_000
KINDS: dict[Document, Any] = {
    Document.IDENTITY: Identity,
    Document.STATE: State,
    Document.CONFIG: Rows[ConfigRow],
    Document.BOOTSTRAP: Rows[Bootstrap],
    Document.PEERS: Rows[PeerRow],
    Document.ROOMS: Rows[Diagnosis],
}
OF_ROLE: dict[str, dict[Document, Any]] = {
    "prefill": {Document.STAGING: Rows[GatedPart], Document.COSTS: Rows[PeerCost]},
    "decode": {Document.STAGING: Ring},
}


def asked(agent: Any) -> RegionDocuments:
    """Returns an agent's documents in its region, published after this call began."""
    documents = RegionDocuments(MemoryReader(agent.telemetry.region), agent.parts.mailbox.fileno())
    assert documents.ask()
    until(documents.served, f"{agent.name} publishes its documents")
    return documents


def rank_of(agent: Any, documents: RegionDocuments) -> ObservedRank:
    header = agent.telemetry.region.header
    return ObservedRank(region_of(agent.telemetry), documents, lambda: process_facts(header), "process")


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    """A fleet with an active room, of which no part is sent yet."""
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 1)).start()
    fleet.room_in_progress = fleet.claim(fleet.receive(fleet.room(7, 8)))
    agents = [*fleet.prefill, *fleet.decode]
    until(
        lambda: all(7 in agent.machine.rooms and agent.machine.rooms[7].transfers for agent in agents),
        "the room is open on both",
    )
    return fleet


def settled(value: Any) -> Any:
    """Returns a value without ages and the use of the process."""
    if isinstance(value, dict):
        return {key: settled(item) for key, item in value.items() if not key.endswith("_ns") and key != "process"}
    return [settled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_is_published_is_what_is_built(fleet: Any, role: str) -> None:
    (agent,) = getattr(fleet, role)
    documents = asked(agent)
    live = RegionDocuments(MemoryReader(agent.telemetry.region), builders=builders(agent.parts, None))
    for document, kind in (KINDS | OF_ROLE[role]).items():
        published, built = documents.read(document, kind), live.read(document, kind)
        assert published != kind() or kind == Rows[GatedPart], f"{document.name} is unknown"
        names = [name for name in published.__struct_fields__ if name != "process"]
        assert [settled(getattr(published, name)) for name in names] == [
            settled(getattr(built, name)) for name in names
        ]
        assert (documents.at_ns(document) or 0) > 0


def test_a_room_that_waits_is_diagnosed(fleet: Any) -> None:
    (agent,) = fleet.decode
    (row,) = rank_of(agent, asked(agent)).rooms()
    assert row["missing"] == ["prefill-0"]
    assert sum(row["owed"].values()) == row["coverage"]["planned"]
    (detail,) = rank_of(agent, asked(agent)).room(7)
    assert [owed["writer"] for owed in detail["owed_parts"]] == ["prefill-0"]


def test_a_loop_that_stands_leaves_what_it_published_with_its_age(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (agent,) = fleet.decode
    rank = rank_of(agent, asked(agent))
    before = rank.status()
    assert before["published_age_ns"] is not None
    monkeypatch.setattr(rank, "now_ns", lambda: time.monotonic_ns() + 100 * S)
    later = rank.status()
    assert (later["published_age_ns"] or 0) >= 100 * S
    assert (later["turn_age_ns"] or 0) >= 100 * S
    assert later["peers"] == before["peers"] == {"ready": 1}
    (peer,) = rank.peers()
    assert 100 * S <= (peer["last_heard_ns"] or 0) < 200 * S


def test_after_its_end_ages_stand_still(fleet: Any) -> None:
    (agent,) = fleet.decode
    rank = rank_of(agent, asked(agent))
    ended_ns = time.monotonic_ns()
    rank.end(ended_ns, "killed by SIGKILL")
    first, second = rank.status(), rank.status()
    assert (first["ended_why"], first["uptime_ns"]) == ("killed by SIGKILL", second["uptime_ns"])
    assert first["uptime_ns"] == ended_ns - rank.header.created_ns
    assert [row["age_ns"] for row in rank.rooms()] == [row["age_ns"] for row in rank.rooms()]
    assert (first["ended_age_ns"] or 0) < (second["ended_age_ns"] or 0) + 1
    assert not rank.cost()["accepting"]


def test_a_busy_loop_publishes_within_its_share(fleet: Any) -> None:
    """Rooms that come and go, and a reader that asks as often as it may."""
    (agent,) = fleet.prefill
    documents = RegionDocuments(MemoryReader(agent.telemetry.region), agent.parts.mailbox.fileno())
    publisher: DocumentPublisher = agent._publisher
    spent_before, began = publisher.spent_ns, time.monotonic_ns()
    number = 100
    while time.monotonic_ns() - began < S:
        documents.ask()
        number += 1
        fleet.recycle(fleet.run(number, 4))
    until(documents.served, "the publisher serves")
    assert documents.read(Document.STATE, State).state == "running"
    took = time.monotonic_ns() - began
    assert 0 < publisher.spent_ns - spent_before <= 0.005 * took + 5_000_000 + 2_000_000
