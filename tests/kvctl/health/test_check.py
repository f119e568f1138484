"""Verdicts of `kvctl check`: the worst of silent agents and findings in each area."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvctl.client.faults import Fault, FaultCode
from kvctl.commands.check import exposition, plugin, rows
from kvctl.exit_codes import CheckState
from kvctl.health.check import Verdict, verdicts, worst
from kvctl.health.engine import HealthReading
from kvctl.health.finding import AREAS, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl_agent.contract.states import UNREGISTERED
from tests.kvctl.health.fleets import Fleet

ALL = tuple(AREAS)
PINNED = Finding("KV_RING_PINNED", Severity.WARNING, "decode-0", ("decode-0",), "a | b\nc", "remedy")


@pytest.fixture
def snapshot() -> Snapshot:
    """A healthy, busy fleet."""
    return Fleet().snapshot()


def by_area(found: list[Verdict]) -> dict[str, CheckState]:
    return {each.area: each.state for each in found}


def look(snapshot: Snapshot, *findings: Finding, ignored: Sequence[Finding] = (), least: int = 1) -> list[Verdict]:
    return verdicts(ALL, HealthReading(snapshot, findings, ignored), "no agent found", least)


def test_a_fleet_that_is_well_is_ok_everywhere(snapshot: Snapshot) -> None:
    assert set(by_area(look(snapshot)).values()) == {CheckState.OK}


def test_a_finding_counts_in_its_area_only(snapshot: Snapshot) -> None:
    states = by_area(look(snapshot, PINNED))
    assert states.pop("staging") is CheckState.WARNING
    assert set(states.values()) == {CheckState.OK}


def test_what_is_only_to_know_is_ok(snapshot: Snapshot) -> None:
    note = Finding("KV_IDLE", Severity.INFO, "fleet", (), "cause", "remedy")
    assert worst(look(snapshot, note)[0].state for _ in ALL) is CheckState.OK


def test_what_is_ignored_does_not_count_and_is_mentioned(snapshot: Snapshot) -> None:
    found = look(snapshot, ignored=[PINNED])
    assert set(by_area(found).values()) == {CheckState.OK}
    assert plugin("all", found, 4).endswith("\nignored: KV_RING_PINNED (1)\n")


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (FaultCode.UNREACHABLE, CheckState.CRITICAL),
        (FaultCode.TIMEOUT, CheckState.CRITICAL),
        (FaultCode.NOT_PERMITTED, CheckState.UNKNOWN),
        (FaultCode.PROTOCOL, CheckState.UNKNOWN),
    ],
)
def test_who_does_not_answer_counts_everywhere_and_is_told_once(
    code: FaultCode, state: CheckState, snapshot: Snapshot
) -> None:
    snapshot.survey.faults.append(Fault("decode-9", code, "no answer"))
    found = look(snapshot)
    assert set(by_area(found).values()) == {state}
    assert plugin("all", found, 4).count("decode-9: no answer") == 1


def test_ready_counts_who_cannot_take_a_room_whatever_explains_it() -> None:
    fleet = Fleet()
    waits = "no hello from prefill-1"
    for name in ("decode-0", "decode-1"):
        fleet.status(name, waiting_for=waits, not_ready=waits)
    lost = Finding("KV_PEER_LOST", Severity.CRITICAL, "prefill-1", ("prefill-1", "decode-0"), "died", "start it")
    (found,) = verdicts(("ready",), HealthReading(fleet.snapshot(), [lost]), "no agent found")
    assert [(each.state, each.text) for each in found.problems] == [
        (CheckState.WARNING, f"decode-0 and decode-1 cannot take a new room: {waits}")
    ]
    known = Finding("KV_NOT_READY", Severity.WARNING, "decode-0", ("decode-0", "decode-1"), "cannot serve", "start it")
    (found,) = verdicts(("ready",), HealthReading(fleet.snapshot(), [lost, known]), "no agent found")
    assert [each.code for each in found.problems] == ["KV_NOT_READY"]


@pytest.mark.parametrize(
    "status", [{"draining": True, "not_ready": "draining"}, {"not_ready": UNREGISTERED}, {"waiting_for": "prefill-9"}]
)
def test_ready_is_ok_with_agents_that_drain_sleep_or_serve(status: dict[str, object]) -> None:
    fleet = Fleet()
    fleet.status("decode-0", **{"not_ready": None, **status})
    assert set(by_area(look(fleet.snapshot())).values()) == {CheckState.OK}


def test_nobody_there_is_critical(snapshot: Snapshot) -> None:
    snapshot.survey.agents.clear()
    found = verdicts(["rooms"], HealthReading(Snapshot(snapshot.survey, 0), []), "no agent found in /run")
    assert plugin("rooms", found, 0) == (
        "KVCTL ROOMS CRITICAL - no agent found in /run | 'agents'=0;;;0; 'warnings'=0;;;0; 'criticals'=1;;;0;\n"
    )


def test_fewer_agents_than_expected_are_critical(snapshot: Snapshot) -> None:
    assert set(by_area(look(snapshot, least=4)).values()) == {CheckState.OK}
    found = look(snapshot, PINNED, least=5)
    line, *more = plugin("all", found, 4).splitlines()
    assert line.startswith("KVCTL CRITICAL - 4 agents answered, of at least 5 (and 1 more) | 'agents'=4;;;0; ")
    assert more == ["WARNING: KV_RING_PINNED decode-0: a / b c"]


def test_gauges_and_rows_say_the_same(snapshot: Snapshot) -> None:
    found = look(snapshot, PINNED)
    text = exposition(found)
    assert 'kvctl_check_state{check="staging"} 1\n' in text
    assert 'kvctl_check_findings{code="KV_RING_PINNED",severity="warning"} 1\n' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {row["check"]: row["state"] for row in rows(found)}["staging"] == "warning"
