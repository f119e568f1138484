"""Searches logs of any size for known failures, those of the table signatures.toml.

A log is read in blocks of whole lines, and each pattern searches a block at once, which is several times faster than
line by line; most blocks have none of the literals that a pattern needs, which is faster to see. Bytes that are no
text, colours and lines of any length do no harm.
"""

from __future__ import annotations

import gzip
import re
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BufferedReader

from kvctl.health.finding import Severity

_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1 << 18  # a longer line is cut
_SHOWN, _SHOWN_BEFORE = 400, 100
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
_GZIP = b"\x1f\x8b"
_OTHERS = {b"\x28\xb5\x2f\xfd": "zstd -dc", b"\xfd7zXZ\x00": "xz -dc", b"BZh": "bzip2 -dc"}
_OTHERS |= {b"\x04\x22\x4d\x18": "lz4 -dc", b"PK\x03\x04": "unzip -p"}
_MAGIC_BYTES = 6


class LogError(Exception):
    """A log cannot be read, or not to its end; the message does not name it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One known failure.

    Attributes:
        pattern: what the line contains; matches within one line.
        literals: a matching line contains at least one of these texts.
        report: URL of a public report, or the source file of the message.
    """

    code: str
    engine: str
    severity: Severity
    pattern: re.Pattern[bytes]
    literals: tuple[bytes, ...]
    cause: str
    next: str
    report: str


@cache
def signatures() -> tuple[Signature, ...]:
    """Returns all known failures, in the order of the table."""
    table = tomllib.loads(files(__package__).joinpath("signatures.toml").read_text())
    return tuple(
        Signature(
            **{
                **row,
                "engine": engine,
                "severity": Severity[row["severity"].upper()],
                "pattern": re.compile(row["pattern"].encode()),
                "literals": tuple(text.encode() for text in row["literals"]),
            }
        )
        for engine, rows in table.items()
        for row in rows
    )


@dataclass(slots=True)
class Match:
    """A known failure in the logs that were searched.

    Attributes:
        log, file, line: where the first one is: number and name of the log; lines count from 1.
        text: the first line, without colours, cut around the match if it is long.
    """

    signature: Signature
    count: int
    log: int
    file: str
    line: int
    text: str
    last: str


class Scan:
    """A search for known failures in one log after the other."""

    def __init__(self) -> None:
        self._found: dict[str, Match] = {}
        self._logs = 0

    def read(self, name: str, file: BufferedReader) -> None:
        """Searches one log; what was found before an error stays found.

        Args:
            file: may be compressed by gzip.

        Raises:
            LogError: its compressed data is damaged, or is of another program.
            OSError: it cannot be read.
        """
        self._logs += 1
        number = 1
        try:
            for block in _blocks(file):
                plain = _ANSI.sub(b"", block) if b"\x1b" in block else block
                for signature in signatures():
                    if any(literal in plain for literal in signature.literals):
                        self._search(plain, signature, name, number)
                number += block.count(b"\n")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise LogError(f"its compressed data is damaged: {error}") from None

    def found(self) -> list[Match]:
        """Returns the known failures, the most severe first, of those the one that came first."""
        return sorted(self._found.values(), key=lambda each: (-each.signature.severity, each.log, each.line))

    def _search(self, block: bytes, signature: Signature, name: str, number: int) -> None:
        begin = 0
        while (hit := signature.pattern.search(block, begin)) is not None:
            start = block.rfind(b"\n", 0, hit.start()) + 1
            end = block.find(b"\n", hit.end())
            begin = end = len(block) if end < 0 else end
            line = number + block.count(b"\n", 0, start) if (match := self._found.get(signature.code)) is None else 0
            if hit.end() - start > _SHOWN:
                start = max(start, hit.start() - _SHOWN_BEFORE)
            text = block[start : min(end, start + 4 * _SHOWN)].decode("utf-8", "replace").strip()[:_SHOWN]
            if match is None:
                self._found[signature.code] = Match(signature, 1, self._logs, name, line, text, text)
            else:
                match.count, match.last = match.count + 1, text


def _blocks(file: BufferedReader) -> Iterator[bytes]:
    """Yields a log in blocks that end at the end of a line; lines of more than `_LINE_BYTES` may be cut."""
    rest = b""
    for piece in _pieces(file):
        whole, newline, tail = (rest + piece).rpartition(b"\n")
        if newline:
            yield whole + newline
        rest = tail
        if len(rest) > _LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def _pieces(file: BufferedReader) -> Iterator[bytes]:
    """Yields the bytes of a file, decompressed if they are compressed."""
    begin = file.peek(_MAGIC_BYTES)
    for magic, unpack in _OTHERS.items():
        if begin.startswith(magic):
            raise LogError(f"is compressed in a way that kvctl does not read: {unpack} FILE | kvctl logs -")
    plain = gzip.GzipFile(fileobj=file) if begin.startswith(_GZIP) else file
    while piece := plain.read(_BLOCK_BYTES):
        yield piece
