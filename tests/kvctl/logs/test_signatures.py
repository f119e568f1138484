"""The table of known failures: each matches its own line and no other's."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvctl.health.finding import Severity
from kvctl.logs.signatures import signatures

LINES = tomllib.loads((Path(__file__).parent / "lines.toml").read_text())


def test_every_signature_has_a_line() -> None:
    codes = [signature.code for signature in signatures()]
    assert len(codes) == len({*codes}) >= 30
    assert {*codes} == LINES.keys()


@pytest.mark.parametrize("code", LINES)
def test_a_line_matches_its_signature_alone(code: str) -> None:
    line = LINES[code].encode()
    assert [signature.code for signature in signatures() if signature.pattern.search(line)] == [code]


def test_what_they_tell() -> None:
    for signature in signatures():
        assert signature.code.partition("-")[0] == signature.engine
        assert signature.severity > Severity.INFO
        assert min(len(signature.cause), len(signature.next)) > 20
        assert re.fullmatch(
            r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+|source: [\w./-]+", signature.report
        )


def test_patterns_stay_within_a_line() -> None:
    for signature in signatures():
        for line in LINES.values():
            found = signature.pattern.search(line.encode() + b"\nnext line\n" + line.encode())
            assert found is None or b"\n" not in found[0]


def test_literals_are_those_of_the_pattern() -> None:
    for signature in signatures():
        plain = re.sub(rb"\\(\W)", rb"\1", signature.pattern.pattern)
        assert signature.literals
        for literal in signature.literals:
            assert len(literal) > 8
            assert literal in plain, signature.code
