"""Commands that act: they ask first, act once, on living agents and with leave, and say what each agent has done."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import orjson
import pytest

from kvctl.client.calls import Call
from kvctl.client.faults import Fault
from kvctl.commands.acting import permitted
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused

ROOM = "18446744073709551615"
# One of each, and the agents that do it in a fleet of fixed answers.
ACTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "abort": (("rooms", "abort", ROOM), {"decode-0", "prefill-0", "prefill-1"}),
    "release": (("staging", "release", "decode-0:7", "--force"), {"decode-0"}),
    "release-room": (("staging", "release", "--room", ROOM, "--force"), {"decode-0"}),
    "drain": (("drain",), {"decode-0", "decode-1", "prefill-0", "prefill-1"}),
    "drain-some": (("drain", "decode-1", "prefill-*"), {"decode-1", "prefill-0", "prefill-1"}),
    "resume": (("resume", "decode-1"), {"decode-1"}),
    "set": (
        ("config", "set", "waiting_timeout_s", "60"),
        {"decode-0", "decode-1", "prefill-0", "prefill-1"},
    ),
}
every = pytest.mark.parametrize("args", [args for args, _ in ACTS.values()], ids=ACTS)


@pytest.mark.parametrize(("args", "agents"), ACTS.values(), ids=ACTS)
def test_those_concerned_do_it_and_say_so(fleet: Any, kvctl: Any, args: tuple[str, ...], agents: set[str]) -> None:
    outcome = kvctl(*args, "--yes", "-o", "json")
    assert (outcome.code, outcome.err) == (0, "")
    document = orjson.loads(outcome.out)
    assert document["schema"] == "kvctl.done/1"
    assert {row["agent"] for row in document["data"]} == agents
    for row in document["data"]:
        assert row["subject"]
        assert row["result"]
        assert row["text"]
    told = kvctl(*args, "--yes", "-o", "table").out.splitlines()
    for line, row in zip(told, document["data"], strict=True):
        assert line.split()[0] == row["agent"]
        assert line.endswith(row["text"]), "however long it is"


@every
def test_nobody_is_told_where_nobody_can_be_asked(start: Any, kvctl: Any, args: tuple[str, ...]) -> None:
    outcome = kvctl(*args)
    assert outcome.code == ExitCode.USAGE
    assert "nobody can be asked: add --yes" in outcome.err


@every
def test_neither_on_a_file_nor_again_and_again(kvctl: Any, tmp_path: Path, args: tuple[str, ...]) -> None:
    file = tmp_path / "recording"
    file.touch()
    for more, wanted in ((("--from", str(file)), "acts on living agents"), (("-w", "1"), "acts once")):
        outcome = kvctl(*args, "--yes", *more)
        assert outcome.code == ExitCode.USAGE
        assert wanted in outcome.err


@every
def test_no_agent(kvctl: Any, socket_directory: Path, args: tuple[str, ...]) -> None:
    outcome = kvctl(*args, "--yes")
    assert outcome.code == ExitCode.NO_AGENT
    assert outcome.out == ""


class Agent(NamedTuple):
    """What is looked at of an agent's answer."""

    name: str
    hello: dict[str, str]


def forbidden(_: dict[str, Any]) -> Any:
    raise RequestRefused(ErrorCode.NOT_PERMITTED, "drain needs level operate, this client has read")


def test_without_leave(start: Any, kvctl: Any) -> None:
    start("decode-0", {"drain": forbidden})
    outcome = kvctl("drain", "--yes")
    assert outcome.code == ExitCode.NOT_PERMITTED
    assert "drain needs level operate" in outcome.err
    start("decode-1")
    outcome = kvctl("drain", "--yes", "-o", "json")
    assert outcome.code == ExitCode.PARTIAL
    document = orjson.loads(outcome.out)
    assert [row["agent"] for row in document["data"]] == ["decode-1"]
    assert [(error["agent"], error["code"]) for error in document["errors"]] == [("decode-0", "not-permitted")]


def test_those_that_give_no_leave_are_known_before_anybody_is_told() -> None:
    faults: list[Fault] = []
    answers = [Agent(name, {"level": level}) for name, level in (("a", "read"), ("b", "operate"), ("c", "admin"))]
    able = permitted(answers, Call("drain"), faults)  # type: ignore[arg-type]
    assert [agent.name for agent in able] == ["b", "c"]
    assert faults == [Fault("a", "not-permitted", "drain needs level operate, and you have read there")]
    change = Call("set", {"key": "pipeline", "value": "on"})
    assert [agent.name for agent in permitted(answers, change, [])] == ["c"]  # type: ignore[arg-type]


def test_what_an_agent_refuses(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("staging", "release", "decode-0:7", "--yes")
    assert outcome.code == ExitCode.FAILED
    assert outcome.err == "kvctl: decode-0: prefill-0 (process 12 on this host) may still write to it\n"
    assert kvctl("config", "set", "nothing", "1", "--yes").code == ExitCode.FAILED


@pytest.mark.parametrize(
    ("args", "code", "wanted"),
    [
        (("rooms", "abort", "12"), 1, "no agent knows room 12"),
        (("staging", "release", "--room", "12"), 1, "no decode rank knows room 12"),
        (("rooms", "abort", "x"), 2, "'x' is not a room number"),
        (("rooms", "abort", "1", "--reason", "x" * 501), 2, "at most 500"),
        (("staging", "release", "decode-0"), 2, "'decode-0' is not AGENT:SERIAL"),
        (("staging", "release", "decode-0:0"), 2, "is not AGENT:SERIAL"),
        (("staging", "release"), 2, "name one allocation (AGENT:SERIAL), or a room with --room"),
        (("staging", "release", "decode-0:7", "--room", "1"), 2, "name one allocation"),
        (("staging", "release", "decode-7:7"), 3, "did you mean"),
        (
            ("staging", "release", "decode-1:7", "-e", "decode-0"),
            1,
            "no agent named decode-1 answers; there are: decode-0",
        ),
        (("drain", "decode-7"), 3, "did you mean"),
        (("drain", "-l", "role=decode,tp=9"), 3, "no agent is role=decode,tp=9"),
    ],
)
def test_what_makes_no_sense(fleet: Any, kvctl: Any, args: tuple[str, ...], code: int, wanted: str) -> None:
    outcome = kvctl(*args, "--yes")
    assert (outcome.code, outcome.out) == (code, "")
    assert wanted in outcome.err


def on_terminal(socket_directory: Path, answer: str, *args: str) -> tuple[int, str]:
    """Exit code, and what a person sees who answers once to `[y/N]`."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvctl", *args],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "KVCTL_SOCKET_DIR": str(socket_directory), "NO_COLOR": "1", "COLUMNS": "200"},
    )
    os.close(theirs)
    seen, told = "", False
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            seen += piece.decode(errors="replace")
            if not told and "[y/N]" in seen:
                told = True
                os.write(ours, answer.encode())
        return process.wait(30), seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("args", "question"),
    [
        (("drain", "decode-1"), "take no new rooms any more: decode-1? [y/N]"),
        (
            ("rooms", "abort", ROOM),
            f"abort room {ROOM} (decode-0 Transferring, prefill-0 Transferring, prefill-1 Transferring)? [y/N]",
        ),
        (
            ("staging", "release", "decode-0:7", "--force"),
            "release allocation 7 of decode-0 (8 MiB, room 7, quarantined for 4 s, writer prefill-0) by force",
        ),
    ],
    ids=["drain", "abort", "release"],
)
def test_a_person_is_asked_and_may_say_no(
    fleet: Any, socket_directory: Path, args: tuple[str, ...], question: str
) -> None:
    code, seen = on_terminal(socket_directory, "\n", *args)
    assert question in seen
    assert "nothing was done" in seen
    assert code == ExitCode.FAILED


def test_a_person_says_yes(fleet: Any, socket_directory: Path) -> None:
    code, seen = on_terminal(socket_directory, "y\n", "drain", "decode-1")
    assert code == 0
    assert "draining" in seen


class TestProbe:
    def test_every_pair_one_after_the_other(self, fleet: Any, kvctl: Any) -> None:
        """decode-1 is only suspect in this fleet, and so is left out."""
        outcome = kvctl("peers", "probe", "-o", "json")
        assert (outcome.code, outcome.err) == (0, "")
        rows = orjson.loads(outcome.out)["data"]
        assert [(row["agent"], row["peer"]) for row in rows[::4]] == [
            ("prefill-0", "decode-0"),
            ("prefill-1", "decode-0"),
        ]
        assert [row["bytes"] for row in rows[:4]] == [64, 512, 4096, 16 << 20]

    def test_one_pair_and_a_size(self, fleet: Any, kvctl: Any) -> None:
        outcome = kvctl("peers", "probe", "prefill-1", "decode-0", "--bytes", "2MiB", "-o", "table")
        assert outcome.code == 0
        lines = outcome.out.splitlines()
        assert lines[0].split() == ["AGENT", "PEER", "DESCRIPTOR", "IN", "A", "WRITE", "TAKES", "EACH", "ADDS", "GB/S"]
        assert lines[-1].split()[:4] == ["prefill-1", "decode-0", "2", "MiB"]

    def test_one_that_takes_its_time_is_asked_until_it_is_done(
        self, start: Any, kvctl: Any, canned: ModuleType
    ) -> None:
        asked: list[dict[str, Any]] = []

        def slow(args: dict[str, Any]) -> Any:
            asked.append(args)
            answer = canned.answers("prefill-0")["probe"](args)
            return answer if len(asked) == 3 else {**answer, "running": True, "rows": []}

        start("prefill-0", {"probe": slow})
        assert kvctl("peers", "probe", "--busy").code == 0
        assert asked == [{"peer": "decode-0", "busy": True}] * 3

    @pytest.mark.parametrize(
        ("args", "code", "wanted"),
        [
            (("decode-0",), 1, "no prefill rank named decode-0 answers; there are: none"),
            (("prefill-0", "decode-1"), 1, "prefill-0 is not connected to decode-1"),
            (("prefill-9",), 3, "did you mean"),
            (("--bytes", "much"), 2, "much"),
            (("-w", "1"), 2, "acts once"),
        ],
    )
    def test_what_makes_no_sense(self, fleet: Any, kvctl: Any, args: tuple[str, ...], code: int, wanted: str) -> None:
        outcome = kvctl("peers", "probe", *args)
        assert (outcome.code, outcome.out) == (code, "")
        assert wanted in outcome.err
