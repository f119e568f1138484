"""Findings about what vLLM's own connectors hand over: handshakes, leases, and prompts that are computed twice."""

from __future__ import annotations

import pytest

from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.codes.advice import VLLM_OBSERVED
from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import NOW, Fleet, S

HANDSHAKE = "handshake failed with localhost:5600: no answer within 5 s"


def observed() -> Fleet:
    """A fleet of vLLM's own connectors, whose agents only observe."""
    fleet = Fleet()
    integration = {"engine": "vllm", "engine_version": "0.32.0", "mode": "observe", "settings": {}}
    for name in fleet.answers:
        fleet.status(name, integration=integration)
    fleet.setting("hold_s", 30.0)
    return fleet


def held(fleet: Fleet, age_s: float, *, computed: bool = True) -> None:
    done = NOW - round(age_s * S) if computed else None
    room = {"peers": [], "missing": [], "state": "Bootstrapping", "forward_done_at_ns": done}
    fleet.room("prefill-0", "77", **room, pages=12, age_ns=round(age_s * S), state_age_ns=round(age_s * S))


def test_a_healthy_fleet_has_no_finding() -> None:
    assert observed().examine(observed()) == []
    assert VLLM_OBSERVED.keys() <= CODES_BY_NAME.keys()


# ---- handshakes --------------------------------------------------------------------------------------------------


def refused(fleet: Fleet, rooms: int = 1) -> None:
    for number in range(rooms):
        fleet.failed(["decode-0"], str(70 + number), "KV_HANDSHAKE_FAILED", "decode-0", HANDSHAKE)
    for row in fleet.answers["decode-0"]["history"][:rooms]:
        row["peers"] = ["prefill-0"]


def test_a_handshake_that_never_came() -> None:
    fleet = observed()
    fleet.peer("decode-0", "prefill-0", state="connecting", last_heard_ns=None, last_error=HANDSHAKE)
    refused(fleet, 2)
    (finding,) = fleet.find("KV_HANDSHAKE_FAILED")
    assert (finding.subject, finding.severity) == ("decode → prefill-0", Severity.CRITICAL)
    assert "no answer within 5 s" in finding.cause
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in finding.remedy
    assert fleet.examine()[0].code == "KV_HANDSHAKE_FAILED"


def test_one_that_came_at_last_is_information() -> None:
    fleet = observed()
    refused(fleet)
    (finding,) = fleet.find("KV_HANDSHAKE_FAILED")
    assert finding.severity == Severity.INFO
    assert "which is connected now" in finding.cause


def test_one_that_no_room_waits_for_is_known_from_the_peer() -> None:
    fleet = observed()
    fleet.peer("decode-0", "prefill-0", state="connecting", last_heard_ns=None, last_error=HANDSHAKE)
    (finding,) = fleet.find("KV_HANDSHAKE_FAILED")
    assert finding.evidence["last_error"] == HANDSHAKE


def test_an_engine_that_has_ended_is_the_cause_itself() -> None:
    fleet = observed()
    refused(fleet)
    fleet.gone("prefill-0")
    fleet.stale.append("prefill-0")
    assert fleet.find("KV_HANDSHAKE_FAILED") == []


# ---- leases ------------------------------------------------------------------------------------------------------


def test_blocks_that_nobody_asks_for() -> None:
    fleet = observed()
    held(fleet, 12)
    (finding,) = fleet.examine()
    assert (finding.code, finding.subject) == ("KV_BLOCKS_UNREAD", "prefill-0")
    assert finding.cause == (
        "prefill-0 holds 12 blocks of 1 room that no decode engine has asked for, the oldest for 12 s"
    )


@pytest.mark.parametrize(("age_s", "computed"), [(9, True), (100, False)])
def test_a_lease_that_is_young_and_a_prompt_that_is_not_computed_are_none(age_s: float, computed: bool) -> None:
    fleet = observed()
    held(fleet, age_s, computed=computed)
    assert fleet.examine() == []


def test_an_agent_that_transfers_itself_has_no_leases() -> None:
    fleet = Fleet()
    held(fleet, 12)
    assert fleet.find("KV_BLOCKS_UNREAD") == []


def test_a_lease_that_has_ended() -> None:
    fleet = observed()
    fleet.failed(["prefill-0"], "7", "KV_HOLD_EXPIRED", "prefill-0", "the lease of its 4 blocks ended before")
    (finding,) = fleet.examine()
    assert finding.code == "KV_HOLD_EXPIRED"
    assert "kv_lease_duration" in finding.remedy


def test_a_read_after_that_comes_first() -> None:
    fleet, before = observed(), observed()
    fleet.failed(["prefill-0"], "7", "KV_HOLD_EXPIRED", "prefill-0", "the lease of its 4 blocks ended before")
    fleet.metric("prefill-0", "kvctl_late_reads_total", 1)
    first, second = fleet.examine(before)
    assert (first.code, first.severity, second.code) == ("KV_READ_AFTER_FREE", Severity.CRITICAL, "KV_HOLD_EXPIRED")
    (later,) = fleet.find("KV_READ_AFTER_FREE", fleet.copy())
    assert later.severity == Severity.CRITICAL
    long_ago = observed()
    long_ago.metric("prefill-0", "kvctl_late_reads_total", 1)
    (later,) = long_ago.find("KV_READ_AFTER_FREE", long_ago.copy())
    assert later.severity == Severity.WARNING


# ---- recomputed --------------------------------------------------------------------------------------------------


def test_prompts_whose_kv_could_not_be_loaded() -> None:
    fleet, before = observed(), observed()
    fleet.metric("decode-0", "kvctl_recomputed_prompts_total", 3, reason="load-failed")
    (finding,) = fleet.examine(before)
    assert (finding.code, finding.severity) == ("KV_RECOMPUTED", Severity.WARNING)
    assert "computed 3 prompts itself: the KV of 3 could not be loaded" in finding.cause
    (later,) = fleet.examine(fleet.copy())
    assert later.severity == Severity.INFO


def test_prompts_without_parameters_count_only_while_prefill_holds_blocks() -> None:
    fleet = observed()
    fleet.metric("decode-0", "kvctl_recomputed_prompts_total", 2, reason="no-parameters")
    assert fleet.examine() == []
    held(fleet, 12)
    (finding,) = fleet.find("KV_RECOMPUTED")
    assert "2 came without the parameters of a prefill engine, while blocks were held for them" in finding.cause
