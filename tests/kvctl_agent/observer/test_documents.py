"""Documents in a region: as they were published, and unknown whenever their content is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.snapshots import ConfigRow, GatedPart
from kvctl_agent.observer.documents import (
    KINDS,
    RegionDocuments,
    Rows,
    State,
    decoded,
    encoded,
    grown,
)
from kvctl_agent.observer.worker import worker_in_process
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import (
    LEAST_LOG_BYTES,
    Cell,
    Document,
    Header,
    MemoryReader,
    RegionReader,
    RegionWriter,
)
from tests.support.answers import gated_part

GATED = gated_part(asked_age_ns=None)


def published(value: bytes, document: Document = Document.STAGING, at_ns: int = 1) -> RegionDocuments:
    writer = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES))
    assert writer.publish(document, value, at_ns)
    return RegionDocuments(MemoryReader(writer))


def rows_of(*rows: dict[str, Any]) -> bytes:
    return encoded({}, list(rows[0]), [msgspec.Raw(msgspec.msgpack.encode(list(row.values()))) for row in rows])


def test_rows_are_read_as_they_were_published() -> None:
    documents = published(rows_of(GATED, {**GATED, "room": "8"}), at_ns=77)
    assert documents.read(Document.STAGING, Rows[GatedPart]).rows == [GATED, {**GATED, "room": "8"}]
    assert documents.at_ns(Document.STAGING) == 77


def test_a_document_that_was_not_published_is_unknown() -> None:
    writer = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES))
    documents = RegionDocuments(MemoryReader(writer))
    assert (documents.read(Document.STATE, State), documents.at_ns(Document.STATE)) == (State(), None)


def test_a_newer_publication_replaces_the_older_one() -> None:
    writer = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES))
    documents = RegionDocuments(MemoryReader(writer))
    for state in ("running", "draining"):
        writer.publish(Document.STATE, encoded({"state": state}, [], []), 1)
        assert documents.read(Document.STATE, State).state == state


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["keys", "rows", "room", "state", "ring", "peers"]) | st.text(), inner)
    ),
)


@given(content=st.binary(max_size=200) | VALUES.map(msgspec.msgpack.encode))
@settings(max_examples=200)
def test_any_content_is_unknown_or_of_the_declared_types(content: bytes) -> None:
    for kind in KINDS:
        found = decoded(content, kind)
        assert found is None or isinstance(found, get_origin(kind) or kind)


def test_asking_wakes_the_agent_four_times_a_second_at_most() -> None:
    writer = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES))
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        documents = RegionDocuments(MemoryReader(writer), wake)
        assert documents.ask()
        assert not documents.served()
        assert documents.ask()  # at once: nothing is asked again, and there still is something to wait for
        assert writer.cells[Cell.WANTED] == 1
        assert os.eventfd_read(wake) == 1
        writer.cells[Cell.SERVED] = 1
        assert documents.served()
        assert not documents.ask()
    finally:
        os.close(wake)


def test_a_region_that_was_cut_short_leaves_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "prefill-0.region"
    written = tmp_path / "prefill-0.new"
    writer = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES), written)
    writer.publish(Document.STATE, encoded({"state": "running"}, [], []), 1)
    path.hardlink_to(written)
    reader = RegionReader(path)
    documents = RegionDocuments(reader)
    writer.close()
    assert documents.read(Document.STATE, State).state == "running"
    os.truncate(path, 100)
    assert documents.read(Document.STATE, State).state == "running"
    assert documents.read(Document.CONFIG, Rows[ConfigRow]) == Rows()
    assert not documents.ask()
    assert documents.served()
    reader.close()


def test_documents_of_an_agent_in_this_process_are_built_when_they_are_read() -> None:
    built: list[str] = []

    def build() -> Any:
        built.append("")
        yield {}
        yield {**GATED, "room": str(len(built))}

    writer = RegionWriter(Header.of_this_process("prefill", "prefill-0", log_bytes=LEAST_LOG_BYTES))
    documents = RegionDocuments(MemoryReader(writer), builders={Document.STAGING: build})
    assert [documents.read(Document.STAGING, Rows[GatedPart]).rows[0]["room"] for _ in range(2)] == ["1", "2"]
    assert documents.read(Document.STATE, State) == State()
    writer.publish(Document.STATE, encoded({"state": "running"}, [], []), 5)  # nobody builds it here
    assert (documents.read(Document.STATE, State).state, documents.at_ns(Document.STATE)) == ("running", 5)


def test_ages_grow_and_unknown_ones_stay_unknown() -> None:
    row = {"age_ns": 5, "asked_age_ns": None, "bytes": 7}
    assert grown([row], 10) == [{"age_ns": 15, "asked_age_ns": None, "bytes": 7}]
    assert row["age_ns"] == 5


def test_several_threads_may_be_the_first_to_read_a_document() -> None:
    """msgspec crashes the process if two threads prepare one type at once."""
    code = """
import sys, threading
from kvctl_agent.observer import documents
value = documents.encoded({"ring": {"x": 1}, "buffers": {"x": 1}, "integration": {"x": 1}}, ["a"], [[1]])
sys.setswitchinterval(1e-6)
start = threading.Barrier(8)
def read():
    start.wait()
    for kind in documents.KINDS:
        documents.decoded(value, kind)
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    ends = [subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode for _ in range(5)]
    assert ends == [0] * 5


def test_health_is_no_older_than_any_of_its_documents() -> None:
    """A peer that was heard just before its row was published is not one that was silent for the time since."""
    telemetry = Telemetry("decode-0", "decode")
    region, empty = telemetry.region, encoded({}, (), ())
    region.publish(Document.STATE, empty, time.monotonic_ns())
    region.publish(Document.PEERS, empty, time.monotonic_ns() - 2_000_000_000)
    worker = worker_in_process(region, load_settings({}), lambda *_: None, None, telemetry.flush)
    worker.siblings = lambda: 1000
    for command, asked in (("status", 0), ("health", 1)):
        worker.call(command)
        assert region.cells[Cell.WANTED] == asked
    region.publish(Document.PEERS, empty, time.monotonic_ns())
    worker.call("health")
    assert region.cells[Cell.WANTED] == 1


@pytest.mark.parametrize("command", ["status", "health"])
@pytest.mark.parametrize(("workers", "age_s", "asks"), [(63, 0, 1), (64, 0, 0), (64, 2, 1)])
def test_of_many_workers_none_is_asked_for_a_state_that_is_young(
    workers: int, age_s: int, asks: int, command: str
) -> None:
    telemetry = Telemetry("decode-0", "decode")
    region = telemetry.region
    region.publish(Document.STATE, encoded({"accepting": True}, (), ()), time.monotonic_ns() - age_s * 1_000_000_000)
    worker = worker_in_process(region, load_settings({}), lambda *_: None, None, telemetry.flush)
    worker.siblings = lambda: workers
    found = worker.call(command)
    assert found.get("status", found)["accepting"]
    assert region.cells[Cell.WANTED] == asks
    worker.documents.expire()  # an operator has changed something
    worker.call(command)
    assert region.cells[Cell.WANTED] == asks + 1
