"""Findings about ranks of SGLang's own backends: the facts are the same, the advice is SGLang's."""

from __future__ import annotations

import re

import pytest

from kvctl.health.codes import CODES_BY_NAME
from kvctl.health.codes.advice import SGLANG
from kvctl.health.finding import Severity
from kvctl_agent.contract.commands import COMMANDS, Level
from kvctl_agent.contract.config import KEYS
from tests.kvctl.health.fleets import MIB, Fleet, S

CHANGES = {command.name for command in COMMANDS if command.level > Level.READ}


def observed() -> Fleet:
    fleet = Fleet()
    for name in fleet.answers:
        fleet.status(name, integration={"engine": "sglang", "engine_version": "0.5.23", "mode": "observe"})
    return fleet


def test_the_table_has_no_unknown_code():
    assert SGLANG.keys() <= CODES_BY_NAME.keys()


def test_a_healthy_observed_fleet_has_no_finding():
    assert observed().examine(observed()) == []


def stuck_writer(fleet: Fleet) -> None:
    fleet.oldest("decode-0", 17, age_ns=20 * S, room_state="Success", writer="prefill-0, prefill-1", state="granted")


def oversized(fleet: Fleet) -> None:
    fleet.answers["decode-0"]["staging"]["ring"].update(refused_total=4, refused_largest_bytes=96 * MIB)


def lost(fleet: Fleet) -> None:
    fleet.gone("prefill-0")
    fleet.stale.append("prefill-0")


def unanswered(fleet: Fleet) -> None:
    fleet.gated("prefill-0", "decode-1", "1002", waiting_for="grant", requests=1, asked_age_ns=13 * S)


def unopened(fleet: Fleet) -> None:
    fleet.room("prefill-0", "5", state="Bootstrapping", state_age_ns=200 * S, age_ns=200 * S, peers=[])


def unseen_watermark(fleet: Fleet) -> None:
    fleet.gated("prefill-0", "decode-0", "1002", age_ns=20 * S)
    fleet.peer("prefill-0", "decode-0", watermark_seen=[0, 0])


@pytest.mark.parametrize(
    ("harm", "code", "subject", "words"),
    [
        (stuck_writer, "KV_RING_PINNED", "decode-0 allocation 17", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"),
        (oversized, "KV_CHUNK_OVERSIZED", "decode-0 ring", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB=96 or more"),
        (lost, "KV_PEER_LOST", "prefill-0", "at the same bootstrap address"),
        (unanswered, "KV_GRANT_UNANSWERED", "prefill-0 → decode-1", "does not repeat a lost request"),
        (unopened, "KV_ROOM_STUCK_BOOTSTRAP", "prefill-0", "bootstrap host, port and room"),
        (unseen_watermark, "KV_SUBSCRIBER_DEAD", "prefill-0 → decode-0", "SGLang does not repeat a watermark"),
    ],
)
def test_each_fault_comes_first_with_advice_for_sglang(harm, code, subject, words):
    fleet = observed()
    before = fleet.copy()
    harm(fleet)
    first = fleet.examine(before)[0]
    assert (first.code, first.subject) == (code, subject)
    assert words in first.remedy
    for command in re.findall("`kvctl ([^`]+)`", first.remedy):
        assert not CHANGES & set(command.split())
    assert not [key.name for key in KEYS if "_" in key.name and key.name in first.remedy]


def test_a_region_that_no_writer_writes_any_more_is_pinned_before_others_wait_for_it():
    fleet = observed()
    stuck_writer(fleet)
    (found,) = fleet.find("KV_RING_PINNED")
    assert "waits for this region until it fails" in found.cause
    assert found.agents == ("decode-0", "prefill-0", "prefill-1")
    fleet.allocation("decode-0", 17, writer="")
    (found,) = fleet.find("KV_RING_PINNED")
    assert "granted 2 MiB of its ring again, 20 s ago, for a chunk of room" in found.cause
    agents = Fleet()
    stuck_writer(agents)
    assert agents.find("KV_RING_PINNED") == []  # the agent revokes it


def test_a_chunk_larger_than_the_ring_fails_rooms_of_sglang():
    fleet = observed()
    oversized(fleet)
    (found,) = fleet.find("KV_CHUNK_OVERSIZED")
    assert found.severity is Severity.CRITICAL
    assert "4 parts refused, their rooms fail" in found.cause


def test_a_server_whose_process_ended_is_lost_at_once():
    fleet = observed()
    lost(fleet)
    (found,) = fleet.find("KV_PEER_LOST")
    assert found.severity is Severity.CRITICAL
    assert found.cause.startswith("prefill-0 died: its process has ended")


def test_a_rank_that_sglang_gave_up_is_not_the_first_cause():
    fleet = observed()
    oversized(fleet)
    fleet.peer("prefill-0", "decode-0", state="lost", last_heard_ns=None, last_error="a transfer to it failed")
    first, second = fleet.examine()
    assert (first.code, second.code) == ("KV_CHUNK_OVERSIZED", "KV_PEER_LOST")
    assert second.severity is Severity.WARNING
    assert second.cause.startswith("prefill-0 gave decode-0 up: a transfer to it failed")
    assert "SGLANG_ENABLE_FAILED_SESSION_PROBE=1" in second.remedy


@pytest.mark.parametrize(
    ("name", "other", "answers", "words"),
    [
        ("prefill-0", "decode-0", False, "at the same bootstrap address"),
        ("decode-0", "prefill-0", False, "prefill servers find it with the first"),
        ("prefill-0", "decode-0", True, "ask its bootstrap server for a sign of life"),
        ("decode-0", "prefill-0", True, "SGLANG_ENABLE_FAILED_SESSION_PROBE=1 on the prefill server"),
    ],
)
def test_the_advice_for_a_lost_server_is_that_for_its_role(name: str, other: str, answers: bool, words: str) -> None:
    fleet = observed()
    fleet.peer(other, name, state="lost", last_heard_ns=9 * S, last_error="it might be dead")
    if not answers:
        fleet.gone(name)
    (found,) = fleet.find("KV_PEER_LOST")
    assert words in found.remedy


def test_a_lost_host_and_rooms_that_failed_before_have_a_finding_too() -> None:
    fleet = observed()
    for each in ("prefill-0", "prefill-1"):
        fleet.gone(each)
        for name in ("decode-0", "decode-1"):
            fleet.peer(name, each, state="lost", last_heard_ns=9 * S, peer_host="node-4", last_error="silent")
    assert [each.subject for each in fleet.find("KV_PEER_LOST")] == ["node-4 → node-3"]
    fleet = observed()
    fleet.failed(["decode-0"], "7", "KV_PEER_LOST", "decode-0", "peer prefill-1 (incarnation 0e) lost: silent")
    assert [each.subject for each in fleet.find("KV_PEER_LOST")] == ["prefill-1"]
