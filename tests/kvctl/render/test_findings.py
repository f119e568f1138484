"""Findings as text: numbers with units, singular and plural."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.health.finding import Finding, Severity
from kvctl.render.findings import figures, folded, headline, in_short, row


def test_evidence_reads_as_words() -> None:
    evidence = {
        "state_age_ns": 41_000_000_000,
        "held_bytes": 2 << 20,
        "owed_cells": {"prefill-1": 8, "prefill-2": 4},
        "failed_rooms": 1,
        "refused_total": 1,
        "parts_total": 2,
        "pid": 21630,
        "missing": [],
        "unknown": {},
    }
    assert figures(evidence) == [
        "state age 41 s",
        "held 2 MiB",
        "owed cells prefill-1=8 prefill-2=4",
        "failed rooms 1",
        "1 refused",
        "2 parts",
        "pid 21630",
    ]


HOSTS = {f"decode-{rank}@n{host}": f"n{host}" for host in range(1, 9) for rank in range(8)}


def finding(agent: str, cause: str = "", code: str = "KV_LANE_SLOW", **more: Any) -> Finding:
    severity = more.pop("severity", Severity.WARNING)
    text = cause or f"{agent} writes 0.{len(agent)} GB/s for 12.5 ms"
    return Finding(code, severity, agent, (agent,), text, f"`kvctl peers -e {agent}` shows its lanes", **more)


def test_findings_of_one_code_on_many_agents_are_one_that_names_the_hosts() -> None:
    names = [name for name in HOSTS if name.endswith(("n2", "n3", "n4", "n5", "n7"))]
    odd = finding(names[0], "it was measured long ago")
    found = [odd, *(finding(name, since_ns=number) for number, name in enumerate(names[1:]))]
    other = finding("decode-0@n1", code="KV_RING_FULL")
    one, single = folded([row(each) for each in (*found, other)], HOSTS)
    assert one["subject"] == "40 agents on n2, n3, n4 and 2 more hosts"
    first = f"39 such as {names[1]}: {names[1]} writes 0.11 GB/s for 12.5 ms"
    assert one["cause"] == f"{first}; 1 such as {names[0]}: it was measured long ago", "the most frequent comes first"
    assert (one["agents"], one["count"], one["since_ns"]) == (names, 40, 38)
    assert one["remedy"] == f"`kvctl peers -e {names[1]}` shows its lanes"
    assert single["subject"] == "decode-0@n1"


def test_few_findings_and_those_of_other_severities_stay_apart() -> None:
    names = list(HOSTS)[:8]
    found = [
        finding(name, severity=Severity.INFO if number < 4 else Severity.WARNING) for number, name in enumerate(names)
    ]
    assert [each["subject"] for each in folded(map(row, found), HOSTS)] == names


def test_findings_of_one_host_name_no_host() -> None:
    names = [f"decode-{rank}" for rank in range(8)]
    (one,) = folded([row(finding(name)) for name in names], dict.fromkeys(names, "n1"))
    assert one["subject"] == "8 agents"


@pytest.mark.parametrize(
    ("severities", "complete", "text"),
    [
        ((), True, "✓ healthy"),
        ((), False, "? incomplete"),
        (("info",), True, "i 1 info"),
        (("info",), False, "? incomplete, 1 info"),
        (("warning", "info"), False, "! 1 warning, 1 info"),
        (("critical", "warning", "warning"), True, "✗ 1 critical, 2 warnings"),
    ],
)
def test_the_headline_calls_only_a_complete_reading_healthy(
    severities: tuple[str, ...], complete: bool, text: str
) -> None:
    assert headline([{"severity": each} for each in severities], complete)[0] == text


def test_the_short_form_counts_findings_by_code() -> None:
    found = [
        *map(finding, list(HOSTS)[:20]),
        finding("prefill-0", code="KV_RING_FULL"),
        finding("x", code="KV_FDS_LOW"),
    ]
    text = "".join(text for text, _ in in_short(found, True))
    assert text.split("  ")[:3] == ["! KV_LANE_SLOW (20)", "! KV_RING_FULL prefill-0", "and 1 more (kvctl health)"]
