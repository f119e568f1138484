"""Searches logs of any size for known failures.

A log is read in blocks of whole lines, and each pattern searches a block at once, which is several times faster than
line by line. Bytes that are no text, colours and lines of any length do no harm.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader

from kvctl.logs.signatures import Signature

_BLOCK_BYTES = 1 << 20
_LINE_BYTES = 1 << 18  # a longer line is cut
_SHOWN = 400
_GZIP = b"\x1f\x8b"
_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")


class LogError(Exception):
    """A log cannot be read; the message names it."""


@dataclass(slots=True)
class Match:
    """A known failure in the logs that were searched.

    Attributes:
        count: number of its lines.
        file, line: where the first one is; lines count from 1.
        text: the first line, without colours, cut if it is long.
        last: the last line, likewise.
    """

    signature: Signature
    count: int
    file: str
    line: int
    text: str
    last: str


def scan(logs: Iterable[tuple[str, BufferedReader]], known: Iterable[Signature]) -> list[Match]:
    """Returns the known failures in some logs, the most severe first, of those the one that came first.

    Args:
        logs: names and files, which may be compressed by gzip.
        known: failures to search for.

    Raises:
        LogError: a file cannot be read, or its compressed data is damaged.
    """
    known = tuple(known)
    found: dict[str, Match] = {}
    for name, file in logs:
        number = 1
        try:
            for block in _blocks(file):
                plain = _ANSI.sub(b"", block) if b"\x1b" in block else block
                for signature in known:
                    _search(plain, signature, name, number, found)
                number += block.count(b"\n")
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise LogError(f"{name}: its compressed data is damaged: {error}") from None
        except OSError as error:
            raise LogError(f"{name}: {error.strerror or error}") from None
    return sorted(found.values(), key=lambda match: -match.signature.severity)


def _search(block: bytes, signature: Signature, name: str, number: int, found: dict[str, Match]) -> None:
    begin = 0
    while (hit := signature.pattern.search(block, begin)) is not None:
        start = block.rfind(b"\n", 0, hit.start()) + 1
        end = block.find(b"\n", hit.end())
        begin = end = len(block) if end < 0 else end
        text = block[start : min(end, start + 4 * _SHOWN)].decode("utf-8", "replace").strip()[:_SHOWN]
        match = found.get(signature.code)
        if match is None:
            line = number + block.count(b"\n", 0, start)
            found[signature.code] = Match(signature, 1, name, line, text, text)
        else:
            match.count += 1
            match.last = text


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
    packed = file.peek(len(_GZIP)).startswith(_GZIP)
    plain = gzip.GzipFile(fileobj=file) if packed else file
    while piece := plain.read(_BLOCK_BYTES):
        yield piece
