"""Findings as text: numbers with units, singular and plural."""

from __future__ import annotations

from kvctl.render.findings import figures


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
