"""`kvctl wait`: exit codes, and texts about missing conditions."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.clock import ClockOffset
from kvctl.client.endpoints import Discovery, Endpoint
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.commands.wait import Drained, Ready


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that are there are waited for, however busy this machine is."""
    monkeypatch.setattr("kvctl.commands.wait._LAST_SURVEY_NS", 60_000_000_000)
    monkeypatch.setenv("KVCTL_TIMEOUT", "60s")


def changing(canned: Any, name: str, *answers: dict[str, Any]) -> Any:
    """A handler of `status` that returns these answers in turn, and then the last one repeatedly."""
    rest = itertools.chain(answers, itertools.repeat(answers[-1]))
    return {"status": lambda _: {**canned.status(name), **next(rest)}}


def test_ready_at_once(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("wait", "--for", "ready")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "kvctl: 4 agents ready\n")
    assert kvctl("wait", "--for", "ready", "-q").err == ""


def test_time_is_up_and_says_who_was_missing(start: Any, kvctl: Any, canned: Any) -> None:
    start("prefill-0", changing(canned, "prefill-0", {"not_ready": "6 of 8 prefill ranks registered, missing tp=2,3"}))
    outcome = kvctl("wait", "--for", "ready", "--timeout", "10ms")
    assert outcome.code == 4
    assert outcome.err == (
        "kvctl: not ready within 10ms; missing: prefill-0: 6 of 8 prefill ranks registered, missing tp=2,3\n"
    )


def test_a_terminal_sees_who_is_missing_on_one_line(start: Any, canned: Any) -> None:
    start("prefill-0", changing(canned, "prefill-0", {"not_ready": "missing tp=1"}))
    terminal, end = os.openpty()
    command = [sys.executable, "-m", "kvctl", "wait", "--for", "ready", "--timeout", "60s"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end, env={**os.environ, "COLUMNS": "60"})
    os.close(end)
    try:
        seen = ""
        while "s left)" not in seen:
            seen += os.read(terminal, 4096).decode()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(30) == 130
    finally:
        waiting.kill()
        out, _ = waiting.communicate()
        os.close(terminal)
    assert seen.startswith("\r\x1b[Kprefill-0: missing tp=1 (")
    assert out == b""


def survey(faults: tuple[str, ...] = (), code: str = FaultCode.TIMEOUT, **statuses: dict[str, Any]) -> Survey:
    def answer(name: str, status: Any) -> AgentAnswer:
        hello: Any = {"name": name}
        endpoint = Endpoint(f"{name}:7311", None, remote=f"tcp://{name}:7311")
        return AgentAnswer(endpoint, hello, 1, ClockOffset(0, 0), {"status": status})

    agents = [answer(name, status) for name, status in statuses.items()]
    silent = [Fault(name, code, "no answer") for name in faults]
    return Survey(Discovery(Path()), agents, silent)


BUSY = {"draining": True, "rooms": {"Transferring": 1, "Success": 2}}
IDLE = {"draining": True, "rooms": {"Success": 2}}


def test_who_ends_while_it_drains_is_drained() -> None:
    goal = Drained()
    assert goal.progress(survey(a=BUSY, b=BUSY)).missing == ["a: 1 room active", "b: 1 room active"]
    assert goal.progress(survey(b=BUSY)).missing == ["b: 1 room active"]
    assert goal.progress(survey()).reached == "0 agents drained, 2 agents ended"


def test_an_agent_on_tcp_that_has_ended_is_known_by_its_address() -> None:
    goal = Drained()
    goal.progress(survey(a=BUSY, b=BUSY))
    ended = survey(("a:7311",), FaultCode.UNREACHABLE, b=IDLE)
    assert goal.progress(ended).reached == "1 agent drained, 1 agent ended"


def test_who_does_not_answer_in_time_has_not_ended() -> None:
    goal = Drained()
    goal.progress(survey(a=BUSY, b=BUSY))
    assert goal.progress(survey(("a:7311",), b=IDLE)).missing == ["a:7311: no answer"]


def test_who_never_answered_is_not_known_to_be_drained() -> None:
    goal = Drained()
    assert goal.progress(survey(("b",), a=IDLE)).missing == ["b: no answer"]
    assert Drained().progress(survey()).missing == ["no agent is there"]


def test_an_agent_of_a_version_that_cannot_drain_takes_new_rooms() -> None:
    assert Drained().progress(survey(a={"rooms": {}})).impossible == "a takes new rooms: kvctl drain a"
    both = survey(a={"rooms": {}}, b={"rooms": {}})
    assert Drained().progress(both).impossible == "a, b take new rooms: kvctl drain a b"


def test_ready_counts_those_that_should_be_there() -> None:
    ready = {"waiting_for": None, "not_ready": None}
    assert Ready(1).progress(survey(a=ready)).reached == "1 agent ready"
    assert Ready(2).progress(survey(a=ready)).missing == ["1 of 2 agents there"]
    assert Ready(1).progress(survey(("b",), a=ready)).missing == ["b: no answer"]


def test_ready_is_who_can_take_a_new_room() -> None:
    """Not who waits for nothing: one of two instances of decode may be gone for good."""
    waits = {"waiting_for": "no hello from prefill-1", "not_ready": None}
    ready = {"waiting_for": None, "not_ready": None}
    found = Ready(2).progress(survey(a=waits, b=ready))
    assert (found.missing, found.reached) == ((), "2 agents ready; a waits: no hello from prefill-1")
    draining = {"waiting_for": None, "not_ready": "it is draining"}
    assert Ready(1).progress(survey(a=draining)).missing == ["a: it is draining"]
    old = {"waiting_for": "no hello from prefill-1"}  # an agent of a version that does not tell
    assert Ready(1).progress(survey(a=old)).missing == ["a: no hello from prefill-1"]
