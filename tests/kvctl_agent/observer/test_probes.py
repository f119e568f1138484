"""Probes of real agents: ready when a router may send them a room, alive while their control loop turns."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.observer import probes
from kvctl_agent.observer.documents import Identity, State
from kvctl_agent.observer.probes import liveness, probe_page, readiness
from kvctl_agent.observer.process_facts import ProcessFacts
from kvctl_agent.telemetry.region import FIRST_COUNTER, Cell
from tests.support.polling import until

RUNNING = State("running", accepting=True)
LOOP = "[+]control-loop ok: last turn "


def get(agent: Any, page: str) -> tuple[int, list[str]]:
    return fetch(agent.admin.metrics_url.replace("/metrics", f"/{page}"))


def fetch(url: str, timeout_s: float = 60) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode().splitlines()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().splitlines()


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


class Rank:
    """What the probes read of a rank."""

    def __init__(self, role: str, state: State = RUNNING, age_s: float | None = 0.1, **given: Any) -> None:
        self.role, self._state, self.age_s = role, state, age_s
        self.ended_ns, self.ended_why = given.get("ended_ns"), given.get("ended_why")
        self._facts = ProcessFacts(given.get("process", "sleeping"))
        self._cells = [0] * FIRST_COUNTER
        self._cells[Cell.TURN_NS], self._cells[Cell.LOOP_ENDED_NS] = 5, given.get("loop_ended_ns", 0)
        self._lost_s = given.get("lost_s", 15.0)

    def state(self) -> State:
        return self._state

    def identity(self) -> Identity:
        return Identity(lost_s=self._lost_s)

    def facts(self) -> ProcessFacts:
        return self._facts

    def cells(self) -> list[int]:
        return self._cells

    def turn_age_ns(self, state: Any) -> int | None:
        return None if self.age_s is None else round(self.age_s * 1e9)


def rank(*arguments: Any, **given: Any) -> Any:
    return Rank(*arguments, **given)


def test_its_state_decides_whether_an_instance_is_there() -> None:
    missing = State("running", accepting=True, instances=2, not_connected="no answer from the registry at tcp://a:1")
    assert readiness(rank("prefill", missing))[0].problem == missing.not_connected
    assert readiness(rank("decode", missing))[0].problem.startswith("0 of 2 prefill instances connected; no answer")
    left = readiness(rank("decode", State("running", accepting=True, instances=2, serving=1)))[0]
    assert (left.problem, left.note) == ("", "1 of 2 prefill instances connected")


@pytest.mark.parametrize(
    ("state", "given", "problem"),
    [
        (State(), {}, "the agent is unknown"),
        (State("unregistered"), {}, "the agent is unregistered"),
        (RUNNING, {"process": "stopped"}, "it is stopped"),
        (RUNNING, {"ended_ns": 7, "ended_why": "killed by SIGKILL"}, "it has ended: killed by SIGKILL"),
    ],
    ids=["nothing published", "unregistered", "stopped", "killed"],
)
def test_a_worker_that_does_not_run_is_not_ready(state: State, given: dict[str, Any], problem: str) -> None:
    assert problem in [check.problem for check in readiness(rank("decode", state, **given))]


def test_a_loop_that_does_not_turn_fails_after_the_limit() -> None:
    assert not liveness(rank("decode", age_s=59))[0].problem
    assert "no turn for 61 s, the limit is 60 s" in liveness(rank("decode", age_s=61))[0].problem
    assert not liveness(rank("decode", age_s=61, lost_s=30.0))[0].problem
    assert not liveness(rank("decode", age_s=None))[0].problem
    assert "thread has ended" in liveness(rank("decode", loop_ended_ns=6))[0].problem
    assert not liveness(rank("decode", State("unregistered"), loop_ended_ns=6))[0].problem
    assert "killed" in liveness(rank("decode", ended_ns=7, ended_why="killed by SIGKILL"))[0].problem


def test_a_loop_that_turns_again_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGCONT: the probe arrives before the loop has had a turn."""
    monkeypatch.setattr(probes, "_GRACE_S", 60)
    ages = iter([500.0, 500.0, 0.0])
    page = probe_page("livez", lambda: liveness(rank("decode", age_s=next(ages))), patient=True)
    assert page().status == 200


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

    monkeypatch.setattr(decode.parts.machine, "handle", stuck)
    try:
        until(lambda: get(decode, "livez")[0] == 503, "livez fails")
    finally:
        goes_on.set()
    until(lambda: get(decode, "livez")[0] == 200, "livez passes again")
