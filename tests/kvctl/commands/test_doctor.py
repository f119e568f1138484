"""`kvctl doctor`: the fleet's findings and this host's, ranked, and the one line to go on with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

from kvctl.health.finding import Severity
from kvctl.health.host.view import Fact
from tests.support.answers import refusal

FACTS = [
    Fact(
        "locked memory",
        "64 KiB (decode-0)",
        "registering fails",
        Severity.WARNING,
        "`ulimit -l unlimited`",
        "KV_REGISTER_FAILED",
    ),
    Fact("RDMA", "no device", "transfers use shared memory on this host and TCP between hosts; nothing is wrong"),
]


def pretend(monkeypatch: pytest.MonkeyPatch, facts: Iterable[Fact]) -> None:
    monkeypatch.setattr("kvctl.commands.doctor.inspect", lambda *_: list(facts))


@pytest.fixture
def host(toy_codes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with one thing wrong."""
    pretend(monkeypatch, FACTS)


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host and a fleet with nothing wrong."""
    monkeypatch.setattr("kvctl.health.engine.CODES", ())
    monkeypatch.setattr("kvctl.commands.health_query.PAUSE_S", 0.0)
    pretend(monkeypatch, FACTS[1:])


@pytest.mark.parametrize("width", [80, 120])
def test_the_page(width: int, host: None, fleet: Any, kvctl: Any, golden: Any, terminal: Any) -> None:
    terminal(width)
    outcome = kvctl("doctor", "-o", "table")
    assert (outcome.code, outcome.err) == (1, "")
    golden(f"doctor-{width}.txt", outcome.out)
    assert outcome.out.splitlines()[-1] == "next: kvctl staging release decode-1:7"


def test_everything_is_ranked(host: None, fleet: Any, kvctl: Any) -> None:
    rows = kvctl("doctor", "-o", "json").data
    assert [(row["rank"], row["severity"], row["code"], row["next"]) for row in rows] == [
        (1, "critical", "KV_RING_FULL", "kvctl staging release decode-1:7"),
        (2, "warning", "KV_RING_FULL", "kvctl staging release decode-0:7"),
        (3, "warning", "KV_REGISTER_FAILED", "ulimit -l unlimited"),
        (4, "info", "KV_FLEET_YOUNG", None),
        (None, "info", "host", None),
    ]


def test_nothing_wrong(sound: None, fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("doctor", "-o", "table")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("✓ healthy   4 agents and this host\n")
    assert "next:" not in outcome.out


def test_without_agents_the_host_is_looked_at_all_the_same(host: None, kvctl: Any) -> None:
    outcome = kvctl("doctor", "-o", "table")
    assert outcome.code == 3
    assert "this host only: no agent answered" in outcome.out.splitlines()[0]
    assert "locked memory" in outcome.out
    assert "no agent found" in outcome.err
    assert "kvctl demo" in outcome.err


def test_without_agents_nothing_is_called_healthy(sound: None, kvctl: Any) -> None:
    outcome = kvctl("doctor", "-o", "table")
    assert outcome.code == 3
    assert outcome.out.startswith("? incomplete   this host only: no agent answered\n")
    alone = kvctl("doctor", "--host-only", "-o", "table")
    assert (alone.code, alone.out.splitlines()[0]) == (0, "✓ healthy   this host only")


def test_the_command_of_a_vllm_server(monkeypatch: pytest.MonkeyPatch, kvctl: Any) -> None:
    monkeypatch.setattr("kvctl.health.host.vllm.running_servers", lambda host: [])
    config = '{"kv_connector": "KvctlConnector", "kv_role": "kv_consumer"}'
    command = ("doctor", "-o", "json", "--", "/none/vllm", "serve", "M", "--kv-transfer-config", config)
    outcome = kvctl(*command)
    assert outcome.code == 1
    causes = [row["cause"] for row in outcome.data if row["subject"] == "vLLM"]
    assert causes[0].startswith("this command (decode): kv_connector_module_path is missing: ")
    valid = config.replace("{", '{"kv_connector_module_path": "kvctl_agent.integrations.vllm.connector", ')
    rows = kvctl(*command[:-1], valid).data
    assert [row["severity"] for row in rows if row["subject"] == "vLLM"] == ["info"]


def test_who_does_not_answer_comes_first_with_what_became_of_it(host: None, hang: Any, start: Any, kvctl: Any) -> None:
    hang("hung")
    start("decode-0")
    outcome = kvctl("doctor", "--timeout", "3s", "-o", "json")
    assert outcome.code == 1
    row = outcome.data[0]
    assert (row["rank"], row["subject"], row["agents"]) == (1, "hung", ["hung"])
    assert f"no answer within 3 s: the observer of this host's agents, process {os.getpid()} is" in row["cause"]


def test_an_agent_that_fails_several_commands_for_one_reason_is_one_finding(
    sound: None, start: Any, kvctl: Any
) -> None:
    refuse = refusal()
    start("decode-0", {"staging": refuse, "peers": refuse})
    outcome = kvctl("doctor", "-o", "table")
    assert (outcome.code, outcome.err) == (1, "kvctl: decode-0: boom\n")
    assert outcome.out.startswith("✗ 1 critical   1 agent and this host\n")
