"""Findings about ranks of vLLM: the remedies name vLLM's options and its proxy's parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.codes.advice import VLLM
from kvctl.health.finding import Severity
from tests.kvctl.health.fleets import Fleet


def of_vllm() -> Fleet:
    fleet = Fleet()
    for name in fleet.answers:
        fleet.status(
            name, integration={"engine": "vllm", "engine_version": "0.32.0", "mode": "connector", "settings": {}}
        )
    return fleet


def test_the_table_has_no_unknown_code() -> None:
    assert VLLM.keys() <= CODES_BY_NAME.keys()


def test_a_healthy_fleet_has_no_finding() -> None:
    assert of_vllm().examine(of_vllm()) == []


def unclaimed(fleet: Fleet) -> None:
    fleet.failed(["prefill-0", "decode-0"], "7", "KV_ROOM_UNCLAIMED", "prefill-0", "no request after 25 s")


def expired(fleet: Fleet) -> None:
    fleet.failed(["prefill-0"], "7", "KV_HOLD_EXPIRED", "prefill-0", "no decode rank opened it within 30 s")


def incompatible(fleet: Fleet) -> None:
    fleet.peer("prefill-0", "decode-0", state="refused", differences=["page_size 48 ≠ 64"])


def duplicate(fleet: Fleet) -> None:
    fleet.failed(["decode-0"], "7", "KV_ROOM_DUPLICATE", "prefill-0", "room 7 is active")


def exchanged(fleet: Fleet) -> None:
    fleet.metric("prefill-0", "kvctl_rooms_refused_total", 3, reason="role")


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (unclaimed, "KV_ROOM_UNCLAIMED", "the same transfer_id"),
        (expired, "KV_HOLD_EXPIRED", "kv_transfer_params of prefill's answer"),
        (incompatible, "KV_COMPAT_MISMATCH", "--kv-cache-dtype"),
        (duplicate, "KV_ROOM_DUPLICATE", "n above 1"),
        (exchanged, "KV_WRONG_ROLE", "exchange kv_role"),
    ],
)
def test_advice_names_options_of_vllm(damage: Callable[[Fleet], None], code: str, words: str) -> None:
    fleet = of_vllm()
    damage(fleet)
    (finding,) = fleet.find(code)
    assert words in finding.remedy
    elsewhere = Fleet()
    damage(elsewhere)
    (finding,) = elsewhere.find(code)
    assert words not in finding.remedy


def test_data_parallel_ranks_get_the_header() -> None:
    fleet = of_vllm()
    name = "prefill-dp1-tp0@127.0.0.1:14580"
    fleet.answers[name], fleet.hellos[name] = fleet.answers["prefill-0"], fleet.hellos["prefill-0"]
    fleet.clocks[name] = fleet.clocks["prefill-0"]
    fleet.failed([name], "7", "KV_ROOM_UNCLAIMED", name, "no request after 25 s")
    findings = fleet.find("KV_ROOM_UNCLAIMED")
    assert any("X-data-parallel-rank" in finding.remedy for finding in findings)


def test_exchanged_roles_are_critical_while_it_lasts() -> None:
    fleet = of_vllm()
    exchanged(fleet)
    assert [finding.severity for finding in fleet.find("KV_WRONG_ROLE")] == [Severity.WARNING]
    before = fleet.copy()
    fleet.metric("prefill-0", "kvctl_rooms_refused_total", 5, reason="role")
    (finding,) = fleet.find("KV_WRONG_ROLE", before)
    assert finding.severity is Severity.CRITICAL
    assert "asked it to receive 5 rooms, but it is a prefill agent" in finding.cause
    fleet.metric("prefill-0", "kvctl_rooms_refused_total", 0, reason="role")
    fleet.metric("prefill-0", "kvctl_rooms_refused_total", 9, reason="state")
    assert fleet.find("KV_WRONG_ROLE") == []
