"""kvctl's view of the servers, with its own backend and with SGLang's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvctl_agent.observer.opentelemetry import trace_ids
from tests.sglang_servers.conftest import Servers
from tests.sglang_servers.test_tokens import prompt
from tests.support.trace_receiver import Receiver

pytestmark = pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")


def kvctl(servers: Servers, *arguments: str) -> subprocess.CompletedProcess[str]:
    if servers.mode == "nixl":
        pytest.skip("the plugin is off in this mode")
    command = [sys.executable, "-m", "kvctl", *arguments]
    # On two busy cores an observer has answered after more than the default of 2 s.
    environment = {**os.environ, "KVCTL_SOCKET_DIR": str(servers.socket_dir), "KVCTL_TIMEOUT": "30s"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def rows(servers: Servers, *arguments: str) -> list[dict[str, Any]]:
    run = kvctl(servers, *arguments, "-o", "json")
    assert run.returncode == 0, run
    return list(json.loads(run.stdout)["data"])


def test_status_has_every_rank(servers: Servers) -> None:
    tp1, tp2, decode = servers.prefills["tp1"].process, servers.prefills["tp2"].process, servers.decodes["tp1"]
    names = {row["name"] for row in rows(servers, "status")}
    assert names == {
        f"prefill-tp0@127.0.0.1:{tp1.port}",
        f"prefill-tp0@127.0.0.1:{tp2.port}",
        f"prefill-tp1@127.0.0.1:{tp2.port}",
        f"decode-tp0@127.0.0.1:{decode.port}",
    }


def test_servers_are_ready_before_their_first_request(servers: Servers) -> None:
    """Decode knows no prefill server until a request names one."""
    assert kvctl(servers, "wait", "--for", "ready", "--agents", "4", "--timeout", "60s").returncode == 0


@pytest.mark.parametrize("pair", ["tp1-tp1", "tp2-tp1"])
def test_a_finished_room_is_in_the_history_of_its_ranks(servers: Servers, pair: str) -> None:
    prefill, decode = servers.pair(pair)
    message = prefill.request(prompt(100, seed=30), 4) | {"rid": f"request-of-{pair}"}
    prefill.send(decode, message)
    found = [row for row in rows(servers, "rooms", "history") if row["room"] == str(message["bootstrap_room"])]
    assert sorted(row["role"] for row in found) == ["decode", *["prefill"] * int(pair[2])]
    assert {row["state"] for row in found} == {"Success"}
    if servers.mode != "observe":
        assert {row["request_id"] for row in found} == {message["rid"]}


@pytest.mark.modes("kvctl", "replace", "observe", reason="the plugin is off")
@pytest.mark.parametrize("pair", ["tp1-tp1", "tp2-tp1"])
def test_a_request_is_one_trace_with_its_phases(servers: Servers, traces: Receiver, pair: str) -> None:
    prefill, decode = servers.pair(pair)
    message = prefill.request(prompt(100, seed=31), 4)
    prefill.send(decode, message)
    trace_id, _ = trace_ids(message["bootstrap_room"], 0)
    ends = ["kv decode", *["kv prefill"] * int(pair[2])]
    spans = traces.wait(*ends, trace=f"{trace_id:032x}")
    by_id = {span.span: span for span in spans}
    (root,) = (span for span in spans if not span.parent)
    assert (root.name, root.service) == ("kv decode", "kvctl-decode")
    assert [span.name for span in spans if span.parent == root.span and span.service == "kvctl-prefill"] == ends[1:]
    phases = [span for span in spans if span.name not in ends]
    assert {span.service for span in phases} == {"kvctl-prefill", "kvctl-decode"}
    for phase in phases:
        end = by_id[phase.parent]
        assert (end.name in ends, end.service) == (True, phase.service)
        assert end.begin_ns <= phase.begin_ns <= phase.end_ns <= end.end_ns
    print(sorted((span.service, span.name) for span in phases))


def test_a_healthy_fleet_has_no_critical_findings(servers: Servers) -> None:
    run = kvctl(servers, "health")
    assert "agents, " in run.stdout, run
    assert "critical" not in run.stdout, run  # warnings, such as KV_GIL_WAIT, are right on a busy host
