"""Verdicts of `kvctl check`: the worst of silent agents, findings and thresholds in each area."""

from __future__ import annotations

import pytest

from kvctl.client.faults import Fault, FaultCode
from kvctl.commands.check import exposition, plugin, rows
from kvctl.exit_codes import CheckState
from kvctl.health.check import MEASURES, Threshold, Verdict, verdicts, worst
from kvctl.health.finding import AREAS, Finding, Severity
from kvctl.health.mutes import Judged, Mute
from kvctl.health.snapshot import Snapshot
from kvctl_agent.contract.states import UNREGISTERED
from tests.kvctl.health.fleets import Fleet

ALL = tuple(AREAS)
PINNED = Finding("KV_RING_PINNED", Severity.WARNING, "decode-0", ("decode-0",), "a | b\nc", "remedy")
WELL = Judged([], [])


@pytest.fixture
def snapshot() -> Snapshot:
    """A healthy, busy fleet."""
    return Fleet().snapshot()


def by_area(found: list[Verdict]) -> dict[str, CheckState]:
    return {each.area: each.state for each in found}


def look(snapshot: Snapshot, judged: Judged = WELL, **thresholds: Threshold) -> list[Verdict]:
    return verdicts(ALL, snapshot, judged, thresholds, "no agent found")


def test_a_fleet_that_is_well_is_ok_everywhere(snapshot: Snapshot) -> None:
    assert set(by_area(look(snapshot)).values()) == {CheckState.OK}


def test_a_finding_counts_in_its_area_only(snapshot: Snapshot) -> None:
    states = by_area(look(snapshot, Judged([PINNED], [])))
    assert states.pop("staging") is CheckState.WARNING
    assert set(states.values()) == {CheckState.OK}


def test_what_is_only_to_know_is_ok(snapshot: Snapshot) -> None:
    note = Finding("KV_IDLE", Severity.INFO, "fleet", (), "cause", "remedy")
    assert worst(look(snapshot, Judged([note], []))[0].state for _ in ALL) is CheckState.OK


def test_what_is_muted_does_not_count_and_is_mentioned(snapshot: Snapshot) -> None:
    found = look(snapshot, Judged([], [(PINNED, Mute("KV_RING_PINNED", "", 0, 1, "", None))]))
    assert set(by_area(found).values()) == {CheckState.OK}
    assert plugin("all", found, {}).endswith("\nmuted: KV_RING_PINNED (1)\n")


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
    assert plugin("all", found, {}).count("decode-9: no answer") == 1


def test_ready_counts_who_cannot_take_a_room_whatever_explains_it() -> None:
    fleet = Fleet()
    waits = "no hello from prefill-1"
    for name in ("decode-0", "decode-1"):
        fleet.status(name, waiting_for=waits, not_ready=waits)
    lost = Finding("KV_PEER_LOST", Severity.CRITICAL, "prefill-1", ("prefill-1", "decode-0"), "died", "start it")
    (found,) = verdicts(("ready",), fleet.snapshot(), Judged([lost], []), {}, "no agent found")
    assert [(each.state, each.text) for each in found.problems] == [
        (CheckState.WARNING, f"decode-0 and decode-1 cannot take a new room: {waits}")
    ]
    known = Finding("KV_NOT_READY", Severity.WARNING, "decode-0", ("decode-0", "decode-1"), "cannot serve", "start it")
    (found,) = verdicts(("ready",), fleet.snapshot(), Judged([lost, known], []), {}, "no agent found")
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
    found = verdicts(["rooms"], Snapshot(snapshot.survey, 0), WELL, {}, "no agent found in /run")
    text = plugin("rooms", found, {})
    assert text.startswith("KVCTL ROOMS CRITICAL - no agent found in /run | ")
    assert "'room-age'=U;;;0;" in text


def test_a_threshold_counts_beside_findings_and_the_worst_comes_first(snapshot: Snapshot) -> None:
    found = look(snapshot, Judged([PINNED], []), ring=Threshold(None, 0.0))
    line, *more = plugin("all", found, {"ring": Threshold(None, 0.0)}).splitlines()
    text, _, performance = line.partition(" | ")
    assert text.startswith("KVCTL CRITICAL - ring ")
    assert text.endswith("(and 1 more)")
    assert more == ["WARNING: KV_RING_PINNED decode-0: a / b c"]
    ring = next(piece for piece in performance.split() if piece.startswith("'ring'="))
    assert ring.endswith(";;0;0;")


def test_a_least_is_a_range_in_performance_data(snapshot: Snapshot) -> None:
    text = plugin("ready", look(snapshot)[:1], {"agents": Threshold(8, 4)})
    assert "'agents'=4;8:;4:;0; " in text


def test_every_value_of_a_busy_fleet_is_known_in_the_unit_of_its_name(snapshot: Snapshot) -> None:
    values = {name: value for each in look(snapshot) for name, value in each.values.items()}
    assert values.keys() == {measure.name for measure in MEASURES}
    assert [name for name, value in values.items() if value is None] == []
    assert 0 <= (values["ring"] or 0) <= 1
    assert 0 < (values["room-age"] or 0) < 3600


def test_the_share_of_failed_rooms_is_that_of_all_agents_in_five_minutes() -> None:
    fleet = Fleet()
    fleet.status("decode-0", rooms_finished_5m={"Success": 90, "Failed": 10})
    fleet.status("decode-1", rooms_finished_5m={"Success": 100})
    for name in ("prefill-0", "prefill-1"):
        fleet.status(name, rooms_finished_5m={})
    values = {name: value for each in look(fleet.snapshot()) for name, value in each.values.items()}
    assert values["failed"] == 0.05


def test_gauges_and_rows_say_the_same(snapshot: Snapshot) -> None:
    found = look(snapshot, Judged([PINNED], []))
    text = exposition(found)
    assert 'kvctl_check_state{check="staging"} 1\n' in text
    assert 'kvctl_check_findings{code="KV_RING_PINNED",severity="warning"} 1\n' in text
    assert "kvctl_check_agents 4\n" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {row["check"]: row["state"] for row in rows(found)}["staging"] == "warning"
