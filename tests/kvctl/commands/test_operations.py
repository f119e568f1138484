"""Commands that change agents: confirmation, one call to live agents that permit it, and the result of each."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import orjson
import pytest

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault, metrics_only
from kvctl.client.fleet import Fleet
from kvctl.commands.mutations import permitted
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused
from tests.support.answers import refusal

ROOM = "18446744073709551615"
# One call of each command, and the agents that execute it in the fleet of fixed answers.
ACTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "abort": (("rooms", "abort", ROOM), {"decode-0", "prefill-0", "prefill-1"}),
    "release": (("staging", "release", "decode-0:7", "--force"), {"decode-0"}),
    "release-room": (("staging", "release", "--room", ROOM, "--force"), {"decode-0"}),
    "abort-request": (("rooms", "abort", "cmpl-7f3a"), {"decode-0", "prefill-0", "prefill-1"}),
    "release-request": (("staging", "release", "--room", "cmpl-7f3a", "--force"), {"decode-0"}),
    "drain": (("drain", "--all"), {"decode-0", "decode-1", "prefill-0", "prefill-1"}),
    "drain-some": (("drain", "decode-1", "prefill-*"), {"decode-1", "prefill-0", "prefill-1"}),
    "resume": (("resume", "decode-1"), {"decode-1"}),
    "forget": (("peers", "forget", "decode-1"), {"prefill-0", "prefill-1"}),
    "set": (("config", "set", "waiting_timeout_s", "60"), {"decode-0", "decode-1", "prefill-0", "prefill-1"}),
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
    assert "asks for confirmation, which needs a terminal: add --yes" in outcome.err


@every
def test_neither_on_a_file_nor_again_and_again(kvctl: Any, tmp_path: Path, args: tuple[str, ...]) -> None:
    file = tmp_path / "recording"
    file.touch()
    for more, wanted in ((("--from", str(file)), "needs live agents"), (("-w", "1"), "acts once")):
        outcome = kvctl(*args, "--yes", *more)
        assert outcome.code == ExitCode.USAGE
        assert wanted in outcome.err


@every
def test_no_agent(kvctl: Any, socket_directory: Path, args: tuple[str, ...]) -> None:
    outcome = kvctl(*args, "--yes")
    assert outcome.code == ExitCode.NO_AGENT
    assert outcome.out == ""


class Agent(NamedTuple):
    """Returns the part of an agent's answer that the test compares."""

    name: str
    hello: dict[str, str]
    endpoint: Endpoint = Endpoint("agent", Path("agent.sock"))


forbidden = refusal(ErrorCode.NOT_PERMITTED, "drain needs level operate, this client has read")


def test_without_leave(start: Any, kvctl: Any) -> None:
    start("decode-0", {"drain": forbidden})
    outcome = kvctl("drain", "--all", "--yes")
    assert outcome.code == ExitCode.NOT_PERMITTED
    assert "drain needs level operate" in outcome.err
    start("decode-1")
    outcome = kvctl("drain", "--all", "--yes", "-o", "json")
    assert outcome.code == ExitCode.PARTIAL
    document = orjson.loads(outcome.out)
    assert [row["agent"] for row in document["data"]] == ["decode-1"]
    assert [(error["agent"], error["code"]) for error in document["errors"]] == [("decode-0", "not-permitted")]


def test_those_that_give_no_leave_are_known_before_anybody_is_told() -> None:
    faults: list[Fault] = []
    answers = [Agent(name, {"level": level}) for name, level in (("a", "read"), ("b", "operate"), ("c", "admin"))]
    able = permitted(answers, Call("drain"), faults)  # type: ignore[arg-type]
    assert [agent.name for agent in able] == ["b", "c"]
    assert faults == [Fault("a", "not-permitted", "drain needs level operate, but your level is read")]
    change = Call("set", {"key": "pipeline", "value": "on"})
    assert [agent.name for agent in permitted(answers, change, [])] == ["c"]  # type: ignore[arg-type]
    engine = Agent("metrics", {"level": "read"}, Endpoint("metrics", None, remote="http://127.0.0.1:1/metrics"))
    assert permitted([engine], Call("drain"), faults) == []  # type: ignore[list-item]
    assert faults[1:] == [metrics_only("metrics", "drain")]


def test_what_an_agent_refuses(fleet: Any, kvctl: Any) -> None:
    outcome = kvctl("staging", "release", "decode-0:7", "--yes")
    assert outcome.code == ExitCode.FAILED
    assert outcome.err == "kvctl: decode-0: prefill-0 (process 12 on this host) may still write to it\n"
    assert kvctl("config", "set", "nothing", "1", "--yes").code == ExitCode.FAILED


class TestAbortSeveral:
    """`rooms abort ROOM...` and `rooms abort --filter`."""

    @pytest.fixture
    def told(self, start: Any, canned: ModuleType) -> list[tuple[str, int]]:
        """Records the calls (agent, room); rooms 1 and 2 are on decode-0 and prefill-0, room 3 on prefill-0 only."""
        told: list[tuple[str, int]] = []

        def agent(name: str, rooms: dict[str, int]) -> None:
            rows = [canned.room_row(name, room, age_ns=age_s * canned.S) for room, age_s in rooms.items()]

            def room(args: dict[str, Any]) -> Any:
                found = [{**row, "timeline": []} for row in rows if row["room"] == str(args["room"])]
                if not found:
                    raise RequestRefused(ErrorCode.UNKNOWN_ROOM, "not here")
                return found

            def abort(args: dict[str, Any]) -> Any:
                told.append((name, args["room"]))
                text = args.get("reason", "")
                return [{"agent": name, "subject": f"room {args['room']}", "result": "aborted", "text": text}]

            start(name, {"rooms": lambda _: rows, "room": room, "abort": abort})

        agent("decode-0", {"1": 9, "2": 3})
        agent("prefill-0", {"1": 2, "2": 3, "3": 4})
        return told

    def test_a_filter_aborts_a_room_on_all_its_ranks(self, told: list[tuple[str, int]], kvctl: Any) -> None:
        outcome = kvctl("rooms", "abort", "--filter", "age>5s", "--reason", "late", "--yes", "-o", "json")
        assert (outcome.code, outcome.err) == (0, "")
        assert sorted(told) == [("decode-0", 1), ("prefill-0", 1)], "only decode-0's row is so old"
        assert {row["text"] for row in outcome.data} == {"late"}

    def test_several_rooms_by_number(self, told: list[tuple[str, int]], kvctl: Any) -> None:
        assert kvctl("rooms", "abort", "3", "1", "3", "--yes").code == 0
        assert sorted(told) == [("decode-0", 1), ("prefill-0", 1), ("prefill-0", 3)]

    def test_one_unknown_number_and_nothing_is_done(self, told: list[tuple[str, int]], kvctl: Any) -> None:
        outcome = kvctl("rooms", "abort", "1", "12", "13", "--yes")
        assert (outcome.code, outcome.out, told) == (1, "", [])
        assert "no agent knows room 12, 13" in outcome.err

    def test_no_room_matches(self, told: list[tuple[str, int]], kvctl: Any) -> None:
        outcome = kvctl("rooms", "abort", "--filter", "age>1h", "--yes")
        assert (outcome.code, outcome.out, told) == (0, "", [])
        assert outcome.err == "kvctl: no rooms match --filter: nothing was aborted\n"
        assert kvctl("rooms", "abort", "--filter", "age>1h", "--yes", "-o", "json").data == []

    def test_an_agent_that_stopped_answering_is_asked_once(self, start: Any, canned: ModuleType, kvctl: Any) -> None:
        rows = [canned.room_row("decode-0", str(room)) for room in range(50)]
        asked: list[int] = []
        given_up = threading.Event()

        def abort(args: dict[str, Any]) -> Any:
            asked.append(args["room"])
            given_up.wait(60)
            return []

        start("decode-0", {"rooms": lambda _: rows, "abort": abort})
        outcome = kvctl("rooms", "abort", "--filter", "age>1s", "--yes", "--timeout", "3s")
        given_up.set()
        assert outcome.code == ExitCode.TIMEOUT
        assert asked == [0]

    def test_control_c_keeps_what_was_done(
        self, told: list[tuple[str, int]], kvctl: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = Fleet.ask

        def interrupted(self: Fleet, requests: Any) -> Any:
            if requests[0][1].args.get("room") == "2":
                raise KeyboardInterrupt
            return ask(self, requests)

        monkeypatch.setattr(Fleet, "ask", interrupted)
        outcome = kvctl("rooms", "abort", "--filter", "age>2.5s", "--yes", "-o", "json")
        assert outcome.code == ExitCode.INTERRUPTED
        assert {row["subject"] for row in outcome.data} == {"room 1"}
        assert sorted(told) == [("decode-0", 1), ("prefill-0", 1)]

    def test_the_rooms_are_listed_before_the_question(self, told: list[tuple[str, int]], on_terminal: Any) -> None:
        code, seen = answered(on_terminal("rooms", "abort", "--filter", "age>2.5s"), "\n")
        assert seen.replace("\r", "").startswith(
            "  1      9 s  decode-0 Transferring, prefill-0 Transferring\n"
            "  2      3 s  decode-0 Transferring, prefill-0 Transferring\n"
            "  3      4 s  prefill-0 Transferring\n"
            "Abort these 3 rooms? [y/N]"
        )
        assert (code, told) == (ExitCode.FAILED, [])
        code, seen = answered(on_terminal("rooms", "abort", "--filter", "age>2.5s"), "y\n")
        assert code == 0
        assert len(told) == 5


@pytest.mark.parametrize("command", ["drain", "resume"])
class TestWhoIsMeant:
    """`drain` and `resume` select all agents only on request."""

    def test_nobody_is_named(self, start: Any, canned: ModuleType, kvctl: Any, command: str) -> None:
        for name, draining in (("decode-0", True), ("prefill-0", False), ("prefill-1", False)):
            start(
                name, {"status": lambda _, name=name, draining=draining: canned.status(name) | {"draining": draining}}
            )
        outcome = kvctl(command, "--yes")
        assert (outcome.code, outcome.out) == (2, "")
        those = {"drain": "not draining: prefill-0, prefill-1", "resume": "draining: decode-0"}[command]
        assert f"name the agents, or use --all ({those})\n" in outcome.err

    def test_a_configured_fleet_is_not_a_choice(
        self, fleet: Any, kvctl: Any, command: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVCTL_ENDPOINT", "decode-0 decode-1")
        outcome = kvctl(command, "--yes")
        assert outcome.code == 2
        assert "prefill" not in outcome.err

    @pytest.mark.parametrize("choice", [("-e", "decode-0"), ("-l", "role=decode,dp=0"), ("decode-0",)])
    def test_a_choice_needs_no_more(self, fleet: Any, kvctl: Any, command: str, choice: tuple[str, ...]) -> None:
        outcome = kvctl(command, *choice, "--yes", "-o", "json")
        assert outcome.code == 0
        assert [row["agent"] for row in outcome.data] == ["decode-0"]

    def test_names_and_all(self, fleet: Any, kvctl: Any, command: str) -> None:
        outcome = kvctl(command, "decode-0", "--all", "--yes")
        assert outcome.code == 2
        assert "name agents or use --all, not both" in outcome.err


def answered(terminal: Any, answer: str) -> tuple[int, str]:
    """Answers the question that a command asks on a terminal; returns the exit code and the screen."""
    terminal.until("[y/N]")
    terminal.press(answer)
    return terminal.rest(), terminal.seen


@pytest.mark.parametrize(
    ("args", "question"),
    [
        (("drain", "--all"), "Drain decode-0, decode-1, prefill-0, prefill-1 (they will accept no new rooms)? [y/N]"),
        (
            ("config", "set", "waiting_timeout_s", "60", "-e", "decode-0"),
            "Set waiting_timeout_s = 60 on decode-0? [y/N]",
        ),
        (
            ("rooms", "abort", ROOM),
            f"Abort room {ROOM} (decode-0 Transferring, prefill-0 Transferring, prefill-1 Transferring)? [y/N]",
        ),
        (
            ("staging", "release", "decode-0:7", "--force"),
            "Release allocation 7 of decode-0 (8 MiB, room 7, quarantined for 4 s, writer prefill-0) by force",
        ),
    ],
    ids=["drain-all", "set", "abort", "release"],
)
def test_a_person_is_asked_and_may_say_no(fleet: Any, on_terminal: Any, args: tuple[str, ...], question: str) -> None:
    code, seen = answered(on_terminal(*args, size=(200, 24)), "\n")
    assert question in seen
    assert "nothing was done" in seen
    assert code == ExitCode.FAILED


class TestProbe:
    def test_every_pair_one_after_the_other(self, fleet: Any, kvctl: Any) -> None:
        """decode-1 is suspect in this fleet and therefore omitted."""
        outcome = kvctl("peers", "probe", "-o", "json")
        assert (outcome.code, outcome.err) == (0, "")
        rows = outcome.data
        assert [(row["agent"], row["peer"]) for row in rows[::4]] == [
            ("prefill-0", "decode-0"),
            ("prefill-1", "decode-0"),
        ]
        assert [row["bytes"] for row in rows[:4]] == [64, 512, 4096, 16 << 20]

    def test_the_counters_around_the_writes_tell_the_lane(self, start: Any, kvctl: Any, canned: ModuleType) -> None:
        probed = 0

        def probe(args: dict[str, Any]) -> Any:
            nonlocal probed
            probed += 1
            return canned.answers("prefill-0")["probe"](args)

        def nics(args: dict[str, Any]) -> Any:
            assert args == {"fresh": True}
            answer = canned.nics("prefill-0")
            answer["nics"][0]["sent_bytes_total"] += probed * (101 << 20)
            return answer

        start("prefill-0", {"probe": probe, "nics": nics})
        row = kvctl("peers", "probe", "-o", "json").data[0]
        assert (row["lane"], row["lane_source"]) == ("rdma", "counters")
        assert (row["carried"], row["moved_bytes"]) == ({"mlx5_0:1": 101 << 20}, 100 << 20)

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
