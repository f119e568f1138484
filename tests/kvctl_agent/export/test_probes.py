"""Probes of real agents: ready when a router may send them a room, alive while their control loop turns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_agent.export import probes
from kvctl_agent.export.probes import liveness, readiness

LOOP = "[+]control-loop ok: last turn "


def get(agent: Any, page: str) -> tuple[int, list[str]]:
    return fetch(agent.parts.exports.metrics_url.replace("/metrics", f"/{page}"))


def fetch(url: str, timeout_s: float = 60) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode().splitlines()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().splitlines()


def wait(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def fleet(make_fleet: Any) -> Any:
    return make_fleet("loopback", prefill=(1, 2), decode=(1, 1), metrics_endpoint="127.0.0.1:0").start()


def test_a_fleet_is_ready_until_it_drains(fleet: Any) -> None:
    (decode,) = fleet.decode
    for agent in fleet.prefill:
        assert get(agent, "readyz") == (
            200,
            ["[+]registered ok", "[+]not-draining ok", "[+]accepting ok", "readyz check passed"],
        )
    assert get(decode, "readyz") == (
        200,
        [
            "[+]peers ok: 1 of 1 prefill instances connected",
            "[+]not-draining ok",
            "[+]accepting ok",
            "readyz check passed",
        ],
    )
    refused = (Path(__file__).parent / "readyz-draining.txt").read_text().splitlines()  # quoted by docs/monitoring.md
    fleet.prefill[0].begin_drain()
    assert get(fleet.prefill[0], "readyz") == (503, refused)
    decode.begin_drain()
    status, lines = get(decode, "readyz")
    assert (status, lines[1:]) == (503, refused[1:])
    assert get(decode, "livez")[0] == 200
    decode.resume()
    assert get(decode, "readyz")[0] == 200


def test_an_agent_without_its_registry_is_alive_and_not_ready(make_fleet: Any) -> None:
    fleet = make_fleet("loopback", prefill=(1, 1), decode=(1, 1), metrics_endpoint="127.0.0.1:0").start()
    (prefill,), (decode,) = fleet.prefill, fleet.decode
    prefill.close()
    wait(lambda: get(decode, "readyz")[0] == 503, "the decode rank is not ready without its prefill rank")
    _, lines = get(decode, "readyz")
    assert lines[0].startswith("[-]peers failed: 0 of 1 prefill instances connected; ")
    status, lines = get(decode, "livez")
    assert (status, lines[0][: len(LOOP)]) == (200, LOOP)


def lifecycle(**given: Any) -> Any:
    usual = {
        "all_instances": ("tcp://a:1", "tcp://b:1"),
        "serving": lambda: [],
        "not_connected": lambda: None,
        "draining": False,
        "accepting": True,
        "state": "running",
    }
    return SimpleNamespace(**{**usual, **given})


def test_the_lifecycle_decides_whether_an_instance_is_there() -> None:
    missing = lifecycle(not_connected=lambda: "no answer from the registry at tcp://a:1")
    assert readiness(missing, "prefill")[0].problem == missing.not_connected()
    assert readiness(missing, "decode")[0].problem.startswith("0 of 2 prefill instances connected; no answer")
    left = readiness(lifecycle(serving=lambda: ["tcp://b:1"]), "decode")[0]
    assert (left.problem, left.note) == ("", "1 of 2 prefill instances connected")


def control(age_s: float | None = 0.1, ended: bool = False) -> Any:
    return SimpleNamespace(turn_age_s=age_s, ended=ended)


def test_a_loop_that_does_not_turn_fails_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_GRACE_S", 0.1)
    assert not liveness(lifecycle(), control(59), 15)[0].problem
    assert "no turn for 61 s, the limit is 60 s" in liveness(lifecycle(), control(61), 15)[0].problem
    assert not liveness(lifecycle(), control(61), 30)[0].problem
    assert not liveness(lifecycle(), control(None), 15)[0].problem
    assert "thread has ended" in liveness(lifecycle(), control(ended=True), 15)[0].problem
    assert not liveness(lifecycle(state="unregistered"), control(ended=True), 15)[0].problem


def test_a_loop_that_turns_again_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGCONT: the probe arrives before the loop has had a turn."""
    monkeypatch.setattr(probes, "_GRACE_S", 60)
    late = control(500.0)
    turning = threading.Timer(0.2, lambda: setattr(late, "turn_age_s", 0.0))
    turning.start()
    try:
        assert not liveness(lifecycle(), late, 15)[0].problem
    finally:
        turning.join()


def test_a_blocked_loop_is_noticed(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (decode,) = fleet.decode
    assert get(decode, "livez")[0] == 200
    monkeypatch.setattr(probes, "_LEAST_LIMIT_S", 0.5)
    monkeypatch.setattr(probes, "_LOST_TIMES", 0)
    monkeypatch.setattr(probes, "_GRACE_S", 0.1)
    goes_on = threading.Event()

    def stuck(*_: Any) -> list[Any]:
        goes_on.wait(60)
        return []

    monkeypatch.setattr(decode.parts.control, "_handle", stuck)
    try:
        wait(lambda: get(decode, "livez")[0] == 503, "livez fails")
    finally:
        goes_on.set()
    wait(lambda: get(decode, "livez")[0] == 200, "livez passes again")


def test_an_agent_whose_memory_the_engine_has_is_alive_and_not_ready(fleet: Any) -> None:
    (decode,) = fleet.decode
    decode.unregister(60)
    assert get(decode, "livez") == (
        200,
        ["[+]control-loop ok: stopped, because the engine has unregistered its memory", "livez check passed"],
    )
    status, lines = get(decode, "readyz")
    assert (status, lines[-2]) == (503, "[-]accepting failed: the agent is unregistered")
    decode.register()
    decode.wait_ready(60)
    assert get(decode, "readyz")[0] == 200


_STOPPED = """
import sys
from kvctl_agent.export import probes
from kvctl_agent.layout.parallel import ParallelConfig
from tests.support.agents import Fleet, Model
probes._LEAST_LIMIT_S, probes._LOST_TIMES, probes._GRACE_S = 0.5, 0, 30  # a busy host may be late for seconds
fleet = Fleet(sys.argv[1], "loopback", Model(), (1, 1), (1, 1), metrics_endpoint="127.0.0.1:0")
with fleet.prefill_agent(0).start() as agent:
    print(agent.observe.status()["metrics_url"], flush=True)
    sys.stdin.read()
"""


def test_a_process_that_was_stopped_is_alive_when_it_continues(tmp_path: Path) -> None:
    """Time passes for a stopped process; its first probe afterwards must not count it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STOPPED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip().replace("/metrics", "/livez")
        assert fetch(url)[0] == 200
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            fetch(url, timeout_s=1.5)
        assert time.monotonic() - began > 1
        os.kill(process.pid, signal.SIGCONT)
        assert fetch(url)[0] == 200
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.communicate(timeout=60)
