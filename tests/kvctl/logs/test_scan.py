"""Logs of any kind: known lines among others, colours, compression, bytes that are no text, lines without end."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.logs import scan as module
from kvctl.logs.scan import LogError, Match, Scan
from tests.kvctl.logs.test_signatures import LINES

NOISE = b'[2026-11-29 19:39:18] INFO:     127.0.0.1:54672 - "POST /generate HTTP/1.1" 200 OK\n'


def of(*logs: bytes) -> list[Match]:
    scan = Scan()
    for number, log in enumerate(logs):
        scan.read(f"{number}.log", io.BufferedReader(io.BytesIO(log)))
    return scan.found()


def line(code: str) -> bytes:
    return LINES[code].encode() + b"\n"


def test_counts_places_and_texts() -> None:
    first, second = line("sglang-prefill-lost"), line("vllm-lease-expired")
    found = of(NOISE * 3 + first + NOISE + first.replace(b"10.0.0.1", b"10.0.0.9"), NOISE + second)
    assert [(each.signature.code, each.count, each.file, each.line) for each in found] == [
        ("sglang-prefill-lost", 2, "0.log", 4),
        ("vllm-lease-expired", 1, "1.log", 2),
    ]
    assert "10.0.0.1" in found[0].text
    assert "10.0.0.9" in found[0].last


def test_lines_that_end_with_the_file() -> None:
    assert [each.line for each in of(NOISE + line("nixl-backend").rstrip())] == [2]
    assert [each.text for each in of(line("nixl-backend").replace(b"\n", b"\r\n"))] == [LINES["nixl-backend"]]


def test_colours() -> None:
    coloured = b"\x1b[1;31mEngineCore \x1b[0mencountered\x1b]8;;http://x\x07 a fatal\x1b[K error.\x1b[0m\n"
    (found,) = of(NOISE + coloured)
    assert (found.signature.code, found.text) == ("vllm-engine-died", "EngineCore encountered a fatal error.")


@pytest.mark.parametrize("nbytes", [1, 7, 64, 1 << 10])
def test_blocks_of_any_size(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"".join(NOISE * 2 + line(code) for code in LINES)
    whole = of(log)
    monkeypatch.setattr(module, "_BLOCK_BYTES", nbytes)
    assert of(log) == whole
    assert {each.signature.code for each in whole} == LINES.keys()
    assert of(gzip.compress(log)) == whole


def test_of_equally_severe_ones_the_first_in_the_log_is_first() -> None:
    """Whatever their order in the table is."""
    for code, other in (("nixl-backend", "vllm-engine-died"), ("vllm-engine-died", "nixl-backend")):
        found = of(NOISE + line(code) + NOISE + line(other), line("sglang-prefill-lost"))
        assert [each.signature.code for each in found] == [code, other, "sglang-prefill-lost"]


def test_damaged_compression() -> None:
    log = NOISE * 1000 + line("nixl-backend")
    packed = gzip.compress(log)
    for damaged in (packed[:-20], packed[:30] + b"\xff" * 30 + packed[60:]):
        with pytest.raises(LogError, match="its compressed data is damaged"):
            of(damaged)


def test_what_was_found_before_the_damage_is_kept() -> None:
    log = line("vllm-lease-expired") + random.Random(1).randbytes(4 << 20)
    scan = Scan()
    with pytest.raises(LogError):
        scan.read("old.log", io.BufferedReader(io.BytesIO(gzip.compress(log)[:-2000])))
    assert [each.signature.code for each in scan.found()] == ["vllm-lease-expired"]


@pytest.mark.parametrize(
    "packed", [b"\x28\xb5\x2f\xfd" + NOISE, lzma.compress(NOISE), bz2.compress(NOISE), b"PK\x03\x04" + NOISE]
)
def test_other_compression_is_refused(packed: bytes) -> None:
    with pytest.raises(LogError, match="that kvctl does not read"):
        of(packed)


def test_the_text_of_a_long_line_has_the_match() -> None:
    (found,) = of(b"x" * 5000 + line("nixl-backend"))
    assert "NIXL_ERR_BACKEND" in found.text
    assert len(found.text) <= 400


def test_a_line_without_end() -> None:
    (found,) = of(b"\x00" * (3 << 20) + line("nixl-backend") + b"x" * (1 << 20))
    assert len(found.text) <= 400


def test_a_large_log_takes_little_memory() -> None:
    """A log of 40 MB, read as a stream that is made while it is read."""

    class Log(io.RawIOBase):
        left = 40

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            if not self.left:
                return 0
            self.left -= 1
            piece = (NOISE * (len(buffer) // len(NOISE) + 1))[: len(buffer)]
            buffer[:] = piece
            return len(buffer)

    stream = cast(io.BufferedReader, io.BufferedReader(Log(), 1 << 20))
    scan = Scan()
    scan.read("-", stream)
    assert scan.found() == []


@given(st.binary(max_size=500), st.integers(min_value=0))
def test_any_bytes(noise: bytes, seed: int) -> None:
    code = random.Random(seed).choice(sorted(LINES))
    found = of(b" " + noise + b"\n" + line(code))
    assert code in {each.signature.code for each in found}
