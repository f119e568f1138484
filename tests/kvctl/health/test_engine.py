"""Order of findings, and a code that raises an exception."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import pytest

from kvctl.client.endpoints import Discovery
from kvctl.client.fleet import Survey
from kvctl.health.engine import examine
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot


@pytest.fixture
def empty(tmp_path) -> Snapshot:
    return Snapshot(Survey(Discovery(tmp_path)), 0)


def code(name: str, *found: Finding) -> Code:
    return Code(name, "sees", "means", "remedy", Severity.CRITICAL, lambda snapshot: found)


def finding(name: str, severity: Severity, subject: str = "a", weight: float = 1.0) -> Finding:
    return Finding(name, severity, subject, (), "cause", "remedy", weight=weight)


def test_the_worst_comes_first_and_what_explains_others_before_them(empty: Snapshot) -> None:
    first = code("KV_FIRST", finding("KV_FIRST", Severity.WARNING), finding("KV_FIRST", Severity.CRITICAL, "b"))
    second = code(
        "KV_SECOND", finding("KV_SECOND", Severity.CRITICAL), finding("KV_SECOND", Severity.CRITICAL, "heavy", 9.0)
    )
    found = examine(empty, [first, second])
    assert [(one.code, one.subject) for one in found] == [
        ("KV_FIRST", "b"),
        ("KV_SECOND", "a"),
        ("KV_SECOND", "heavy"),
        ("KV_FIRST", "a"),
    ]


def test_findings_of_one_code_keep_their_order_whatever_they_weigh(empty: Snapshot) -> None:
    weights = {"decode-2": 1.0, "decode-10": 9.0, "room 7": 3.0}
    for order in permutations(weights):
        found = examine(empty, [code("KV_X", *(finding("KV_X", Severity.WARNING, each, 1.0) for each in order))])
        assert [one.subject for one in found] == ["decode-2", "decode-10", "room 7"]
    heavier = [finding("KV_X", Severity.WARNING, each, weight) for each, weight in reversed(weights.items())]
    assert [one.subject for one in examine(empty, [code("KV_X", *heavier)])] == ["decode-2", "decode-10", "room 7"]


def test_a_code_that_fails_is_told_of_and_stops_no_other(empty: Snapshot) -> None:
    def fails(snapshot: Snapshot) -> Iterable[Finding]:
        yield finding("KV_BROKEN", Severity.CRITICAL)
        raise KeyError("bytes")

    broken = Code("KV_BROKEN", "", "", "", Severity.CRITICAL, fails)
    found = examine(empty, [broken, code("KV_FINE", finding("KV_FINE", Severity.WARNING))])
    assert [(one.code, one.severity) for one in found] == [("KV_FINE", Severity.WARNING), ("KV_BROKEN", Severity.INFO)]
    assert "KeyError: 'bytes'" in found[1].cause
