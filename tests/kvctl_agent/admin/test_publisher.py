"""The publisher: every document is published, and it takes no more of the control loop's time than it may."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kvctl_agent.admin import publisher as published
from kvctl_agent.admin.publisher import DocumentPublisher
from kvctl_agent.contract.snapshots import ConfigRow, GatedPart
from kvctl_agent.observer.documents import Builder, RegionDocuments, Rows, State
from kvctl_agent.telemetry.region import LEAST_LOG_BYTES, Cell, Document, Header, MemoryReader, RegionWriter
from tests.support.answers import gated_part

MS, S = 1_000_000, 1_000_000_000
GATED = gated_part(asked_age_ns=None)


class FakeTime:
    """Clocks that only tests advance; work takes processor time, and waiting does not."""

    def __init__(self) -> None:
        self.now_ns, self.worked_ns = 1000 * S, 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def thread_time_ns(self) -> int:
        return self.worked_ns

    def work(self, ns: int) -> None:
        self.now_ns += ns
        self.worked_ns += ns


class Rig:
    """A publisher of the documents STATE and STAGING, whose rows take time to build."""

    def __init__(self, clock: FakeTime, rows: int, row_ns: int) -> None:
        self.clock, self.rows, self.row_ns = clock, rows, row_ns
        self.built: list[Document] = []
        self.between_rows: Callable[[], None] = lambda: None
        self.region = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES))
        self.documents = RegionDocuments(MemoryReader(self.region))
        builders: dict[Document, Builder] = {Document.STATE: self._state, Document.STAGING: self._staging}
        self.publisher = DocumentPublisher(self.region, builders)

    def _state(self) -> Iterator[Mapping[str, Any]]:
        self.built.append(Document.STATE)
        yield {"state": "running"}

    def _staging(self) -> Iterator[Mapping[str, Any]]:
        self.built.append(Document.STAGING)
        yield {}
        for number in range(self.rows):
            self.clock.work(self.row_ns)
            self.between_rows()
            yield {**GATED, "room": str(number)}

    def ask(self) -> int:
        self.region.cells[Cell.WANTED] += 1
        return self.region.cells[Cell.WANTED]

    def turn(self) -> int:
        """Makes a turn as the control loop does; returns the processor time that it took."""
        before_ns = self.clock.worked_ns
        self.publisher.turn()
        took_ns = self.clock.worked_ns - before_ns
        self.clock.now_ns += max(1, round(min(self.publisher.wait_s(), 0.1) * 1e9))
        return took_ns

    def turns_until_served(self, wanted: int) -> int:
        for number in range(1, 1000):
            self.turn()
            if self.region.cells[Cell.SERVED] >= wanted:
                return number
        raise AssertionError("not served")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(published, "time", fake)
    return fake


def test_all_documents_are_published_when_a_reader_asks(clock: FakeTime) -> None:
    rig = Rig(clock, rows=3, row_ns=0)
    rig.turns_until_served(rig.ask())
    assert rig.documents.read(Document.STATE, State).state == "running"
    assert [row["room"] for row in rig.documents.read(Document.STAGING, Rows[GatedPart]).rows] == ["0", "1", "2"]


def test_a_turn_with_nothing_to_do_builds_nothing(clock: FakeTime) -> None:
    rig = Rig(clock, rows=3, row_ns=0)
    rig.turns_until_served(rig.ask())
    rig.built.clear()
    for _ in range(100):
        rig.publisher.turn()
    assert rig.built == []
    assert rig.publisher.wait_s() == float("inf")


def test_without_a_reader_each_document_is_published_once_a_second(clock: FakeTime) -> None:
    rig = Rig(clock, rows=3, row_ns=0)
    until_ns = clock.now_ns + 10 * S
    while clock.now_ns < until_ns:
        rig.turn()
    assert 8 <= rig.built.count(Document.STATE) <= 11
    assert 8 <= rig.built.count(Document.STAGING) <= 11


def test_a_large_document_is_built_in_turns_of_a_millisecond(clock: FakeTime) -> None:
    rig = Rig(clock, rows=40, row_ns=MS // 10)  # 4 ms
    wanted, took = rig.ask(), []
    while rig.region.cells[Cell.SERVED] < wanted:
        took.append(rig.turn())
    assert max(took) <= MS + rig.row_ns
    assert len(rig.documents.read(Document.STAGING, Rows[GatedPart]).rows) == 40


@pytest.mark.parametrize(("asks", "share"), [(True, 0.005), (False, 0.0012)], ids=["asked", "unasked"])
def test_documents_take_a_small_share_of_the_time(clock: FakeTime, asks: bool, share: float) -> None:
    rig = Rig(clock, rows=200, row_ns=MS // 10)  # 20 ms
    saved_ns, began_ns, worked_ns = 5 * MS, clock.now_ns, clock.worked_ns
    while clock.now_ns < began_ns + 100 * S:
        if asks:
            rig.ask()
        rig.turn()
    assert clock.worked_ns - worked_ns <= share * (clock.now_ns - began_ns) + saved_ns + MS + rig.row_ns
    assert rig.built.count(Document.STAGING) >= 3


def test_a_document_that_seldom_changes_is_built_again_when_it_has_changed(clock: FakeTime) -> None:
    rig = Rig(clock, rows=3, row_ns=0)
    version = 1
    rig.publisher = DocumentPublisher(
        rig.region,
        {Document.STATE: rig._state, Document.STAGING: rig._staging},
        {Document.STAGING: lambda: version},
    )
    for _ in range(3):
        rig.turns_until_served(rig.ask())
    assert (rig.built.count(Document.STATE), rig.built.count(Document.STAGING)) == (3, 1)
    version = 2
    rig.turns_until_served(rig.ask())
    assert rig.built.count(Document.STAGING) == 2


def test_time_in_which_the_thread_does_not_run_ends_no_slice(clock: FakeTime) -> None:
    """As beside an engine that spins, where another thread has the interpreter for 100 ms after each row."""
    rig = Rig(clock, rows=5, row_ns=MS // 10)
    rig.between_rows = lambda: setattr(clock, "now_ns", clock.now_ns + 100 * MS)
    assert rig.turns_until_served(rig.ask()) == 1


@pytest.mark.parametrize("asks", [True, False], ids=["asked", "unasked"])
def test_the_state_is_published_every_second_whatever_others_cost(clock: FakeTime, asks: bool) -> None:
    rig = Rig(clock, rows=3, row_ns=50 * MS)
    oldest_ns, until_ns = 0, clock.now_ns + 60 * S
    rig.publisher.publish_all()
    while clock.now_ns < until_ns:
        if asks:
            rig.ask()
        rig.turn()
        rig.documents.read(Document.STATE, State)
        oldest_ns = max(oldest_ns, clock.now_ns - (rig.documents.at_ns(Document.STATE) or 0))
    assert oldest_ns <= (0.35 if asks else 1.5) * S


def test_who_asks_gets_the_state_before_what_is_being_built(clock: FakeTime) -> None:
    rig = Rig(clock, rows=100, row_ns=MS // 10)
    rig.ask()
    rig.turn()
    asked_ns = clock.now_ns
    rig.ask()
    rig.turn()
    rig.documents.read(Document.STATE, State)
    assert (rig.documents.at_ns(Document.STATE) or 0) >= asked_ns
    assert rig.documents.read(Document.STAGING, Rows[GatedPart]) == Rows()


def test_of_a_document_that_is_too_large_the_first_rows_are_published(clock: FakeTime) -> None:
    rig = Rig(clock, rows=5000, row_ns=0)
    rig.turns_until_served(rig.ask())
    found = rig.documents.read(Document.STAGING, Rows[GatedPart]).rows
    assert 1000 < len(found) < 5000
    assert rig.region.cells[Cell.TOO_LARGE] == 0


def test_a_builder_that_raises_costs_its_own_document_only(clock: FakeTime) -> None:
    def broken() -> Iterator[Mapping[str, Any]]:
        yield {}
        raise RuntimeError("broken")

    rig = Rig(clock, rows=3, row_ns=0)
    rig.publisher = DocumentPublisher(
        rig.region, {Document.CONFIG: broken, Document.STATE: rig._state, Document.STAGING: rig._staging}
    )
    wanted = rig.ask()
    with pytest.raises(RuntimeError, match="broken"):
        rig.publisher.turn()
    clock.now_ns += 2 * MS
    rig.turns_until_served(wanted)
    assert rig.documents.read(Document.STATE, State).state == "running"
    assert rig.documents.read(Document.CONFIG, Rows[ConfigRow]) == Rows()


def test_a_reader_that_asks_meanwhile_is_served_with_what_is_built_afterwards(clock: FakeTime) -> None:
    rig = Rig(clock, rows=40, row_ns=MS // 10)
    first = rig.ask()
    rig.turn()
    asked_ns = clock.now_ns
    second = rig.ask()
    rig.turns_until_served(second)
    assert first < second
    rig.documents.read(Document.STATE, State)
    rig.documents.read(Document.STAGING, Rows[GatedPart])
    assert (rig.documents.at_ns(Document.STATE) or 0) >= asked_ns
    assert (rig.documents.at_ns(Document.STAGING) or 0) >= asked_ns


def test_everything_is_published_at_once_before_the_loop_runs(clock: FakeTime) -> None:
    rig = Rig(clock, rows=40, row_ns=MS)
    rig.publisher.publish_all()
    assert len(rig.documents.read(Document.STAGING, Rows[GatedPart]).rows) == 40
    assert rig.documents.read(Document.STATE, State).state == "running"
