"""Formats for programs: unrounded numbers, empty unknown values, escaped line breaks."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvctl.commands.metrics import exposition, sample_rows
from kvctl.render.data import comma_separated, json_document, tsv
from kvctl.render.events import EVENTS
from kvctl.render.rooms import ROOMS
from kvctl.render.sanitize import printable_lines

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


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


ANY_DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(ANY_DATA)
def test_json_reads_back_and_is_printable(data: Any) -> None:
    text = json_document(ROOMS, [data], [], 7, indent=True)
    assert json.loads(text)["data"] == [data]
    assert all(each.isprintable() or each == "\n" for each in text)


def test_prometheus_names_cannot_add_lines() -> None:
    family = {
        "name": "a 1\nb",
        "kind": "gauge\nx 1",
        "unit": "",
        "help": "h\x1b",
        "samples": [{"labels": {'k"} 1\n': 'v\x9b\n"'}, "value": 1}],
    }
    assert exposition(sample_rows("agent\x1b", [family])).splitlines() == [
        "# HELP a_1_b h\ufffd",
        "# TYPE a_1_b gauge x 1",
        'a_1_b{agent="agent\ufffd",k___1_="v\ufffd\\n\\""} 1',
    ]


def test_prometheus_text_groups_families_and_escapes(canned: Any) -> None:
    rows = sample_rows('we"ird\\', canned.metrics("decode-0")) + sample_rows("b", canned.metrics("prefill-0"))
    text = exposition(rows)
    assert text.count("# TYPE kvctl_room_seconds histogram") == 1
    assert 'kvctl_room_seconds_bucket{agent="b",le="+Inf"} 10\n' in text
    assert 'kvctl_room_seconds_sum{agent="b"} 1.5\n' in text
    assert 'kvctl_ring_size_bytes{agent="we\\"ird\\\\"} 67108864\n' in text
    assert 'kvctl_ring_size_bytes{agent="b"}' not in text  # unknown for this agent
