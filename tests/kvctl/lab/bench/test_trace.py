"""Reading request traces: accepted lines, error messages, scaling."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvctl.lab.bench.trace import MAX_LINE_BYTES, TraceError, parse, read, scaled

GOOD = {"timestamp": 2000, "input_length": 1300, "output_length": 7, "hash_ids": [0, 4, 5]}


def line(**changes: Any) -> bytes:
    return orjson.dumps({name: value for name, value in {**GOOD, **changes}.items() if value != "absent"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_a_line_is_a_request():
    prompt = parse(line(unknown="ignored"))
    assert (prompt.tokens, prompt.output_tokens, prompt.arrival_ms) == (1300, 7, 2000.0)
    assert prompt.blocks == prompt.kept == (0, 4, 5)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "invalid JSON"),
        (b"\xff", "invalid JSON"),
        (b"[1]", "the line is list, not an object"),
        (b"null", "the line is missing, not an object"),
        (line(input_length="absent"), "input_length is missing"),
        (line(input_length=0), "input_length is 0, not a whole number from 1 to"),
        (line(input_length=1.5), r"input_length is 1\.5"),
        (line(input_length=True), "input_length is True"),
        (line(input_length=1 << 60), "input_length is 1152921504606846976"),
        (line(output_length=-1), "output_length is -1"),
        (line(timestamp="0"), "timestamp is str, not milliseconds"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=1e300), r"timestamp is 1e\+300"),
        (line(hash_ids=None), "hash_ids is missing, not a list"),
        (line(hash_ids=[0, "1"]), r"hash_ids\[1\] is str, not a whole number"),
        (line(hash_ids=[0, -1]), r"hash_ids\[1\] is -1"),
        (line(hash_ids=[0, 1, 2, 3]), "hash_ids names 4 blocks of 512, but the prompt has 1300 tokens"),
    ],
)
def test_another_line_is_refused_with_the_reason(text: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_wrong_lines_are_skipped_and_named_by_number(file: Path):
    file.write_bytes(b"\n".join([line(), b"", b"nonsense", line(timestamp=1), line(input_length=0)]))
    found = read(file, most=9)
    assert [request.arrival_ms for request in found.requests] == [1.0, 2000.0]  # by time
    assert list(found.skipped) == [3, 5]
    assert found.notes[0].startswith("requests.jsonl line 3 is skipped: invalid JSON")
    assert len(found.notes) == 2


def test_of_many_wrong_lines_the_first_are_named_and_the_rest_counted(file: Path):
    file.write_bytes(b"no\n" * 10 + line())
    notes = read(file, most=9).notes
    assert len(notes) == 4
    assert notes[-1] == "requests.jsonl: 7 more lines are skipped"


def test_no_more_is_read_than_asked_for(file: Path):
    file.write_bytes(line() + b"\n" + line(timestamp=9) + b"\nnonsense")
    assert len(read(file, most=2).requests) == 2


def test_a_line_without_end_is_not_read_to_its_end():
    with pytest.raises(TraceError, match=f"/dev/zero line 1 has more than {MAX_LINE_BYTES} bytes"):
        read(Path("/dev/zero"), most=1)


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read: No such file"), (b"", "has no request"), (b"x", "no request: line 1: invalid JSON")],
)
def test_a_file_without_requests_is_refused(file: Path, content: bytes | None, why: str):
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TraceError, match=why):
        read(file, most=9)


def test_lengths_and_arrivals_are_scaled_together_with_the_blocks(file: Path):
    file.write_bytes(line() + b"\n" + line(timestamp=3000, input_length=1, output_length=0, hash_ids=[]))
    traffic = scaled(read(file, 9), Fraction("0.05"), speedup=4)
    assert traffic.block_tokens == Fraction("25.6")
    assert [(each.tokens, each.arrival_ms) for each in traffic.prompts] == [(65, 0.0), (1, 250.0)]
    assert traffic.prompts[0].blocks == (0, 4, 5)


def test_an_infinite_speedup_leaves_no_arrivals(file: Path):
    file.write_bytes(line())
    traffic = scaled(read(file, 9), Fraction(1), math.inf)
    assert traffic.prompts[0].arrival_ms is None
