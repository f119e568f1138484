"""Health codes for tests, so that the output of commands does not depend on the shipped codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.rooms import finished_rows

GOLDEN = Path(__file__).parent / "golden"


def _full(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("decode"):
        ring = agent.status["ring"]
        if ring["used_bytes"] / ring["size_bytes"] >= 0.3:
            yield Finding(
                code="KV_RING_FULL",
                severity=Severity.CRITICAL if agent.name == "decode-1" else Severity.WARNING,
                subject=f"{agent.name} ring",
                agents=(agent.name, "prefill-0"),
                since_ns=41_000_000_000,
                weight=ring["used_bytes"],
                evidence={
                    "used_bytes": ring["used_bytes"],
                    "used_ratio": 0.375,
                    "writers": ["prefill-0"],
                    "rooms_total": 3,
                },
                cause=f"prefill-0 was granted 24 MiB of {agent.name}'s ring 41 s ago for room 7 and has neither "
                "written it nor given it back; 3 writers wait behind it",
                remedy=f"`kvctl staging release {agent.name}:7` if the process of prefill-0 is gone, otherwise raise "
                "staging_ring_mb to 512",
            )


def _young(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.before is not None:
        yield Finding("KV_FLEET_YOUNG", Severity.INFO, "fleet", (), "it began lately", "wait")


CODES = (
    Code(
        "KV_RING_FULL",
        "transfers stop",
        "The ring is full: what lies in it is not taken out.",
        "Release it.",
        Severity.CRITICAL,
        _full,
        "kvctl_ring_used_bytes > 0.3 * kvctl_ring_size_bytes",
        "staging",
    ),
    Code("KV_FLEET_YOUNG", "nothing", "It began lately.", "Wait.", Severity.INFO, _young),
)


@pytest.fixture
def toy_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the codes: a full ring on each decode rank, and one note; no pause between readings."""
    by_name = {code.name: code for code in CODES}
    monkeypatch.setattr("kvctl.health.engine.CODES", CODES)
    monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)
    monkeypatch.setattr("kvctl.commands.health.CODES", CODES)
    monkeypatch.setattr("kvctl.commands.health_query.CODES_BY_NAME", by_name)
    monkeypatch.setattr("kvctl.health.check.CODES_BY_NAME", by_name)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares with a file, byte for byte; `UPDATE_GOLDEN=1` rewrites it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), name

    return check


@pytest.fixture
def now(canned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it a minute after the agents' answers for the times since rooms ended."""
    monkeypatch.setattr(
        "kvctl.commands.rooms.finished_rows", lambda rows, _: finished_rows(rows, canned.NOW + 60 * canned.S)
    )
