"""`kvctl wait`: exit codes, and texts about missing conditions."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.answers import refusal


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


def test_ready_after_a_while(start: Any, kvctl: Any, canned: Any) -> None:
    start("prefill-0", changing(canned, "prefill-0", {"not_ready": "missing tp=1"}, {"not_ready": None}))
    assert kvctl("wait", "--for", "ready").code == 0


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


def test_agents_that_have_not_started_are_missing(start: Any, kvctl: Any) -> None:
    assert "no agent is there yet" in kvctl("wait", "--for", "ready", "--timeout", "10ms").err
    start("decode-0")
    outcome = kvctl("wait", "--for", "ready", "--agents", "2", "--timeout", "10ms")
    assert outcome.code == 4
    assert "1 of 2 agents there" in outcome.err


def test_drained_when_no_room_is_active(start: Any, kvctl: Any, canned: Any) -> None:
    busy = {"draining": True, "rooms": {"Transferring": 2, "Success": 1}}
    start("decode-0", changing(canned, "decode-0", busy, {"draining": True, "rooms": {"Success": 1}}))
    outcome = kvctl("wait", "--for", "drained")
    assert (outcome.code, outcome.err) == (0, "kvctl: 1 agent drained\n")


def test_a_room_that_is_past_the_state_has_reached_it(fleet: Any, kvctl: Any, canned: Any) -> None:
    for state in ("Transferring", "waitingforinput"):
        assert kvctl("wait", "--for", f"room={canned.ROOM}:{state}").code == 0
    outcome = kvctl("wait", "--for", f"room={canned.ROOM}:Success", "--timeout", "10ms")
    assert outcome.code == 4
    assert "decode-0 in Transferring" in outcome.err


def test_a_room_that_failed_will_not_succeed(start: Any, kvctl: Any, canned: Any) -> None:
    for name in canned.FLEET[:3]:
        start(name, canned.answers(name, failed=True))
    outcome = kvctl("wait", "--for", f"room={canned.ROOM}:Success")
    assert outcome.code == 1
    assert "failed: prefill-1: NIXL_ERR_BACKEND" in outcome.err
    assert kvctl("wait", "--for", f"room={canned.ROOM}:Failed").code == 0


def test_a_room_that_nobody_knows_yet(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("wait", "--for", "room=12:Success", "--timeout", "10ms")
    assert outcome.code == 4
    assert "room 12: no agent knows it yet" in outcome.err


def test_an_agent_that_does_not_say_is_missing(start: Any, kvctl: Any) -> None:
    start("decode-0", {"status": refusal()})
    outcome = kvctl("wait", "--for", "ready", "--timeout", "10ms")
    assert outcome.code == 4
    assert "decode-0: boom" in outcome.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "Missing option '--for'"),
        (("--for", "redy"), "wait for ready, drained or room=NUMBER:STATE"),
        (("--for", "room=x:Success"), "not a room number"),
        (("--for", "room=7:Done"), "not a state of a room"),
        (("--for", "room=7"), "not a state of a room"),
        (("--for", "ready", "--timeout", "soon"), "--timeout: 'soon' is not a duration"),
        (("--for", "ready", "--from", __file__), "needs live agents"),
    ],
)
def test_wrong_usage(args: tuple[str, ...], words: str, kvctl: Any) -> None:
    outcome = kvctl("wait", *args)
    assert outcome.code == 2
    assert words in outcome.err


def test_how_long_an_agent_may_take_stands_before_the_command(fleet: Any, kvctl: Any) -> None:
    assert kvctl("--timeout", "1500ms", "wait", "--for", "ready").code == 0
