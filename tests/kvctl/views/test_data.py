"""Formats for programs: raw numbers, nothing for the unknown, nothing that breaks a line."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.faults import Fault
from kvctl.views.data import comma_separated, json_document, tsv
from kvctl.views.events import EVENTS
from kvctl.views.metrics import exposition, sample_rows
from kvctl.views.printable import printable_lines
from kvctl.views.rooms import ROOMS

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def test_tsv_has_units_in_its_header_and_raw_numbers(canned: Any) -> None:
    header, line = tsv(ROOMS.columns, [canned.room_row("decode-0")]).splitlines()
    row = dict(zip(header.split("\t"), line.split("\t"), strict=True))
    assert (row["age_ns"], row["bytes"], row["room"]) == ("6000000000", "16777216", canned.ROOM)
    assert (row["latency_ns"], row["sent"], row["landed"]) == ("", "", "48")
    assert row["paths"] == "staged=2"


@given(ANY_TEXT)
def test_a_row_is_one_line_whatever_it_says(text: str) -> None:
    row = {"at_ns": 1, "agent": "a", "kind": "k", "severity": "info", "sequence": 1, "text": text}
    printed = tsv(EVENTS.columns, [row], header=False)
    assert printed.count("\n") == 1
    assert printed.count("\t") == len(EVENTS.columns) - 1
    assert "\x1b" not in printed


@given(ANY_TEXT)
def test_csv_reads_back(text: str) -> None:
    row = {"at_ns": 1, "agent": "a", "text": text}
    header, line = csv.reader(io.StringIO(comma_separated(EVENTS.columns, [row])))
    assert dict(zip(header, line, strict=True))["text"] == printable_lines(text)


def test_the_envelope_names_schema_time_data_and_errors() -> None:
    document = json.loads(json_document(ROOMS, [{"room": "1"}], [Fault("a", "timeout", "m")], 7, indent=True))
    assert document == {
        "schema": "kvctl.rooms/1",
        "generated_at_ns": 7,
        "data": [{"room": "1"}],
        "errors": [{"agent": "a", "code": "timeout", "message": "m"}],
    }


def test_prometheus_text_groups_families_and_escapes(canned: Any) -> None:
    rows = sample_rows('we"ird\\', canned.metrics("decode-0")) + sample_rows("b", canned.metrics("prefill-0"))
    text = exposition(rows)
    assert text.count("# TYPE kvctl_room_seconds histogram") == 1
    assert 'kvctl_room_seconds_bucket{agent="b",le="+Inf"} 10\n' in text
    assert 'kvctl_room_seconds_sum{agent="b"} 1.5\n' in text
    assert 'kvctl_ring_size_bytes{agent="we\\"ird\\\\"} 67108864\n' in text
    assert 'kvctl_ring_size_bytes{agent="b"}' not in text  # unknown there
