"""The table of known failures: each matches its own line and no other's."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.logs.scan import Scan, Signature, signatures

LINES = tomllib.loads((Path(__file__).parent / "lines.toml").read_text())


def test_every_signature_has_a_line() -> None:
    codes = [signature.code for signature in signatures()]
    assert len(codes) == len({*codes}) >= 30
    assert {*codes} == LINES.keys()


@pytest.mark.parametrize("code", LINES)
def test_a_line_matches_its_signature_alone(code: str) -> None:
    scan = Scan()
    scan.read("a.log", io.BufferedReader(io.BytesIO(LINES[code].encode())))
    assert [match.signature.code for match in scan.found()] == [code]


def test_patterns_stay_within_a_line() -> None:
    for signature in signatures():
        for line in LINES.values():
            found = signature.pattern.search(line.encode() + b"\nnext line\n" + line.encode())
            assert found is None or b"\n" not in found[0]


@pytest.mark.parametrize("signature", signatures(), ids=lambda signature: signature.code)
@given(data=st.data())
@settings(max_examples=30)
def test_whatever_a_pattern_matches_has_a_literal(signature: Signature, data: st.DataObject) -> None:
    """Of every alternative, and without optional groups: `Scan` searches no block without a literal."""
    assert min(map(len, signature.literals)) > 8
    found = data.draw(st.from_regex(signature.pattern, fullmatch=True))
    assert any(literal in found for literal in signature.literals)
