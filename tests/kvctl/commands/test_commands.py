"""Commands with real admin servers: selection of agents, refusals, partial answers, exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvctl.client.health_reads import BRIEF
from kvctl.commands import queries
from kvctl_agent.contract.admin import ErrorCode, region_directory
from kvctl_agent.contract.commands import COMMANDS_BY_NAME, Level
from kvctl_agent.observer.server import SERVED_HERE
from tests.support.answers import refusal

READING = (
    ("status",),
    ("agents",),
    ("rooms",),
    ("rooms", "ls"),
    ("rooms", "history"),
    ("rooms", "slow"),
    ("rooms", "show", "7"),
    ("staging",),
    ("staging", "map"),
    ("layers",),
    ("peers",),
    ("peers", "matrix"),
    ("peers", "diff", "prefill-0", "decode-0"),
    ("bootstrap",),
    ("stacks",),
    ("metrics",),
    ("events",),
    ("config", "show"),
    ("version", "--agents"),
)


@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_without_agents_every_command_exits_3_and_json_stays_json(args: tuple[str, ...], kvctl: Any) -> None:
    outcome = kvctl(*args, "-o", "json")
    assert outcome.code == 3
    assert json.loads(outcome.out)["schema"].startswith("kvctl.")
    assert "no agent found" in outcome.err
    assert "kvctl demo" in outcome.err
    plain = kvctl(*args)
    assert plain.out == "" or args[0] == "version"


def test_options_are_taken_before_and_after_the_command(fleet: Any, kvctl: Any) -> None:
    for args in READING:
        before = kvctl("-o", "json", "-e", "decode-0", *args)
        after = kvctl(*args, "-o", "json", "-e", "decode-0")
        assert (before.code, before.err) == (after.code, after.err), args
        documents = [json.loads(each.out).keys() for each in (before, after)]
        assert documents == [{"schema", "generated_at_ns", "data", "errors"}] * 2, args


def test_the_innermost_flag_wins_and_lists_add_up(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("-o", "csv", "-e", "decode-0", "rooms", "-o", "jsonl", "-e", "decode-1")
    assert {json.loads(line)["agent"] for line in outcome.out.splitlines()} == {"decode-0", "decode-1"}


@pytest.mark.parametrize("command", [("rooms",), ("rooms", "history"), ("peers",), ("staging",)])
def test_a_filter_that_leaves_nothing_is_not_a_fleet_without_any(
    command: tuple[str, ...], fleet: Any, kvctl: Any
) -> None:
    assert kvctl(*command, "--filter", "agent=nobody", "-o", "table").out == "no rows match --filter\n"


def test_partial_answers_are_printed_named_and_exit_7(start: Any, kvctl: Any) -> None:
    start("decode-0")
    start("decode-1", {"peers": refusal(ErrorCode.INTERNAL, "peers failed inside the agent: boom")})
    outcome = kvctl("peers", "-o", "json")
    assert outcome.code == 7
    document = json.loads(outcome.out)
    assert {row["agent"] for row in document["data"]} == {"decode-0"}
    assert document["errors"] == [
        {"agent": "decode-1", "code": "internal", "message": "peers failed inside the agent: boom"}
    ]
    assert outcome.err == "kvctl: decode-1: peers failed inside the agent: boom\n"


@pytest.mark.parametrize(
    ("code", "expected"), [(ErrorCode.NOT_PERMITTED, 5), (ErrorCode.UNKNOWN_COMMAND, 6), (ErrorCode.INTERNAL, 1)]
)
def test_when_all_refuse_the_reason_is_the_exit_code(code: ErrorCode, expected: int, start: Any, kvctl: Any) -> None:
    start("decode-0", {"layers": refusal(code, "no")})
    assert kvctl("layers").code == expected


def test_a_hanging_agent_exits_4_and_with_others_7(hang: Any, start: Any, kvctl: Any) -> None:
    hang("hung")
    assert kvctl("status", "--timeout", "100ms").code == 4
    start("decode-0")
    outcome = kvctl("status", "--timeout", "3s", "-o", "table")
    assert outcome.code == 7
    assert "1 agent, 1 not answering" in outcome.out
    assert "hung: no answer within 3 s" in outcome.err


def test_stale_sockets_are_marked_and_harm_nobody(leave_stale: Any, start: Any, kvctl: Any) -> None:
    leave_stale("dead")
    outcome = kvctl("agents", "-o", "json")
    assert outcome.code == 3
    assert [(row["agent"], row["state"]) for row in outcome.data] == [("dead", "stale")]
    start("decode-0")
    outcome = kvctl("agents", "-o", "json")
    assert outcome.code == 7
    assert "dead: its process has ended and left its socket: kvctl agents --prune removes it" in outcome.err
    assert [(row["agent"], row["state"]) for row in outcome.data] == [("dead", "stale"), ("decode-0", "ok")]
    assert kvctl("status").code == 0
    assert kvctl("status", "-e", "dead").code == 3
    assert kvctl("status", "-e", "dead", "-e", "decode-0").code == 7


def test_labels_that_match_nobody_exit_3_and_say_who_answered(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("status", "-l", "role=decode,tp=7")
    assert outcome.code == 3
    assert "no agent has the labels role=decode,tp=7; 4 others answered" in outcome.err


def test_filters_reach_the_timeline_of_a_joined_room(fleet: Any, kvctl: Any, canned: Any) -> None:
    (room,) = kvctl("rooms", "show", canned.ROOM, "-o", "json", "--filter", "stage=wire").data
    assert [event["stage"] for event in room["timeline"]] == ["wire"]


def test_events_are_narrowed_by_age(fleet: Any, kvctl: Any) -> None:
    assert kvctl("events", "--since", "5m", "-o", "jsonl").out == ""
    assert kvctl("events", "--since", "99999h", "-o", "jsonl").out.count("\n") == 8


def test_version_needs_no_agent(kvctl: Any) -> None:
    assert kvctl("version", "-o", "json").code == 0
    assert kvctl("--version").out == "kvctl 0.1.0\n"


def test_what_the_tool_sends_is_what_agents_declare(start: Any, kvctl: Any, canned: Any, tmp_path: Path) -> None:
    """Runs every reading command and checks the requests that the agents received."""
    seen: dict[str, set[str]] = {}

    def noting(name: str, handler: Any) -> Any:
        def handle(args: dict[str, Any]) -> Any:
            seen.setdefault(name, set()).update(args)
            return handler(args)

        return handle

    start("decode-0", {name: noting(name, handler) for name, handler in canned.answers("decode-0").items()})
    for args in (*READING, ("rooms", "show", canned.ROOM), ("rooms", "--state", "Failed")):
        kvctl(*args)
    kvctl("record", str(tmp_path / "recording"))
    reading = {name for name, command in COMMANDS_BY_NAME.items() if command.level is Level.READ}
    assert seen.keys() == reading - SERVED_HERE - {BRIEF.command}  # of large fleets only
    for name, used in seen.items():
        assert used <= {arg.name for arg in COMMANDS_BY_NAME[name].args}


def test_prune_removes_what_the_dead_left_and_nothing_else(
    leave_stale: Any, socket_directory: Path, start: Any, kvctl: Any
) -> None:
    start("decode-0")
    for name in ("killed", "no-lock", "held"):
        leave_stale(name)
    for name in ("killed", "held"):
        (socket_directory / f"{name}.lock").write_text("4194304\n")
    (socket_directory / "foreign.sock").write_text("no socket")
    (socket_directory / "foreign.lock").touch()
    with (socket_directory / "held.lock").open() as lock, socket.socket(socket.AF_UNIX) as living:
        fcntl.flock(lock, fcntl.LOCK_EX)
        living.bind(os.fspath(socket_directory / "unlocked.sock"))
        living.listen()
        (socket_directory / "unlocked.lock").touch()
        assert "removed the sockets of killed\n" in kvctl("agents", "--prune", "--timeout", "100ms").err
        left = sorted(path.name for path in socket_directory.iterdir())
    assert left == [
        *("decode-0.lock", "decode-0.sock", "foreign.lock", "foreign.sock", "held.lock", "held.sock"),
        *("no-lock.sock", "unlocked.lock", "unlocked.sock"),
    ]
    assert kvctl("agents", "--prune", "--from", "file").code == 2


def test_prune_removes_black_boxes(socket_directory: Path, start: Any, kvctl: Any) -> None:
    start("decode-0")
    regions = region_directory(socket_directory)
    regions.mkdir(0o700, exist_ok=True)
    for suffix in ("ended", "region"):
        (regions / f"decode-1@a.b.4711.00ff.{suffix}").touch()
    outcome = kvctl("agents", "--prune", "--timeout", "100ms")
    assert "removed the black boxes of decode-1@a.b, listed for another second\n" in outcome.err
    assert [path.suffix for path in regions.iterdir()] == [".region"]
    assert "no ended agents" in kvctl("agents", "--prune", "--timeout", "100ms").err


def test_a_socket_directory_that_is_not_there_is_named(
    kvctl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(tmp_path / "gone"))
    for args in (("status",), ("status", "-e", "decode-0"), ("agents", "--prune")):
        outcome = kvctl(*args)
        assert outcome.code == 3
        assert f"KVCTL_SOCKET_DIR names {tmp_path / 'gone'}, which does not exist" in outcome.err
    monkeypatch.setenv("KVCTL_SOCKET_DIR", __file__)
    assert f"KVCTL_SOCKET_DIR names {__file__}, which is not a directory" in kvctl("status").err


def test_where_no_agent_can_be_started_the_installation_is_named(kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "find_spec", lambda name: None)
    assert "Start some here: kvctl demo, which needs the agent: `pip install '.[nixl]'`" in kvctl("status").err
