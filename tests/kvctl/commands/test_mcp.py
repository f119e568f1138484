"""`kvctl mcp` by the SDK's own client: every tool answers, and none changes anything."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from mcp.client.client import Client
from mcp_types import CallToolResult

import kvctl
from kvctl.commands import mcp_server
from kvctl.commands.context_file import Contexts
from kvctl.commands.registry import COMMANDS as CLI_COMMANDS
from kvctl.commands.registry import load
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.commands import COMMANDS, Level
from kvctl_agent.errors import RequestRefused

ARGUMENTS: dict[str, dict[str, Any]] = {
    "hosts_show": {"host": "n1"},
    "peers_diff": {"a": "prefill-0", "b": "decode-0", "all": True},
    "health_explain": {"code": "KV_PEER_LOST"},
    "config_explain": {"key": "checksum"},
    "rooms_ls": {"limit": 1.0, "filter": ["age>1s"], "sort_by": "-age", "label": ["role=decode"]},
    "version": {"agents": True},
}


def over_stdio(use: Callable[[Client], Awaitable[Any]], *options: str) -> Any:
    """Starts `kvctl mcp` with options, and returns what `use` returns of a client of it."""
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "kvctl", "mcp", *options], env={**os.environ, "KVCTL_TIMEOUT": "30s"}
    )
    return asyncio.run(_used(command, use))


async def _used(server: Any, use: Callable[[Client], Awaitable[Any]]) -> Any:
    async with Client(server) as client:
        return await use(client)


def calls(*wanted: tuple[str, dict[str, Any]]) -> Callable[[Client], Awaitable[list[CallToolResult]]]:
    async def use(client: Client) -> list[CallToolResult]:
        return [await client.call_tool(name, given) for name, given in wanted]

    return use


def text(result: CallToolResult) -> str:
    return "\n".join(str(getattr(each, "text", each)) for each in result.content)


# The only test that runs every tool, and so 31 processes: a few seconds.
def test_every_tool_answers_and_asks_agents_to_read_only(start: Any, canned: Any, tmp_path: Path) -> None:
    changed: list[str] = []
    changing = {
        command.name: lambda *given, name=command.name, **more: changed.append(name) or {}
        for command in COMMANDS
        if command.level > Level.READ
    }
    for name in ("prefill-0", "decode-0"):
        start(name, changing, host="n1")

    async def use(client: Client) -> dict[str, CallToolResult]:
        tools = (await client.list_tools()).tools
        assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools)
        # Without schemas of results: a client may give the whole list to its model.
        assert len(json.dumps([tool.model_dump(exclude_none=True) for tool in tools])) < 45_000
        given = {**ARGUMENTS, "rooms_show": {"room": canned.ROOM}}
        results = [client.call_tool(tool.name, given.get(tool.name, {})) for tool in tools]
        return dict(zip([tool.name for tool in tools], await asyncio.gather(*results), strict=True))

    results: dict[str, CallToolResult] = over_stdio(use)
    assert {name: text(result) for name, result in results.items() if result.is_error} == {}
    assert [row["agent"] for row in results["rooms_ls"].structured_content["data"]] == ["decode-0"]
    assert results["rooms_show"].structured_content["schema"] == "kvctl.room/1"
    assert changed == []


def test_no_tool_is_a_command_that_asks_before_it_changes_something_or_writes_a_file() -> None:
    def paths(command: Any, path: str) -> Any:
        children = getattr(command, "commands", None)
        if children:
            for name, child in children.items():
                yield from paths(child, f"{path} {name}")
        else:
            yield path, {parameter.name for parameter in command.params}

    every = {path: names for name in CLI_COMMANDS for path, names in paths(load(name), name)}
    asking = {path for path, names in every.items() if "yes" in names}
    assert {"drain", "rooms abort", "staging release", "config set", "peers forget"} <= asking
    others = {"health mute", "health unmute", "record", "context use", "key new", "peers probe", "demo"}
    assert not {*mcp_server.READING} & (asking | others)
    assert {*mcp_server.READING} <= every.keys()

    async def use(client: Client) -> list[tuple[str, set[str]]]:
        return [(tool.name, {*tool.input_schema["properties"]}) for tool in (await client.list_tools()).tools]

    for name, parameters in asyncio.run(_used(mcp_server.make_server([]), use)):
        hidden = {"endpoint", "context", "key", "server_key", "from", "output", "watch", "prune", "perfetto", "command"}
        hidden |= {"url"}
        assert not parameters & (hidden - ({"key"} if name == "config_explain" else set())), name


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("drain", {"all": True}, "no tool 'drain'; there are: status, "),
    ("rooms_show", {}, "rooms_show: 'room' is a required property"),
    ("rooms_ls", {"limit": "all"}, "rooms_ls: limit: 'all' is not of type 'integer'"),
    ("rooms_ls", {"endpoint": "tcp://10.0.0.1:7000"}, "'endpoint' was unexpected"),
    ("rooms_ls", {"filter": ["size>3"]}, "kvctl: no column 'size' here"),
    ("rooms_show", {"room": "--perfetto=/tmp/written"}, "no agent knows a room of request --perfetto=/tmp/written"),
    ("rooms_ls", {"limit": 10**30}, "rooms_ls: limit: 1000000000000000000000000000000 is greater than the maximum"),
    ("rooms_show", {"room": "a\0b"}, "rooms_show: embedded null byte"),
    ("rooms_show", {"room": "7" * 200_000}, "rooms_show: [Errno 7] Argument list too long"),
    ("hosts_show", {"host": "n9"}, "kvctl: no agent is on a host n9; kvctl hosts lists the 1 that have"),
]


def test_what_cannot_be_answered_is_an_error_of_the_tool(start: Any) -> None:
    start("prefill-0", host="n1")
    wanted = [(tool, given) for tool, given, _ in WRONG]
    results = asyncio.run(_used(mcp_server.make_server([]), calls(*wanted)))
    for result, (tool, given, words) in zip(results, WRONG, strict=True):
        assert result.is_error, (tool, given)
        assert words in text(result), (tool, given)


def test_a_long_answer_is_cut_and_says_so(start: Any, canned: Any) -> None:
    rooms = [canned.room_row("decode-0", str(number)) for number in range(1000)]
    start("decode-0", {"rooms": lambda *given, **more: rooms})
    (result,) = asyncio.run(_used(mcp_server.make_server([]), calls(("rooms_ls", {"limit": 900}))))
    assert not result.is_error
    shown = len(result.structured_content["data"])
    assert 10 < shown < 900
    assert len(text(result)) < mcp_server.SIZE_LIMIT_BYTES * 1.1
    assert f"{shown} of 900 entries of data are shown" in text(result)


def test_many_errors_leave_the_rows_of_a_long_answer(start: Any, canned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **more: Any) -> Any:
        raise RequestRefused(ErrorCode.NOT_PERMITTED, "x" * 150)

    monkeypatch.setattr(mcp_server, "SIZE_LIMIT_BYTES", 12_000)
    start("decode-0", {"rooms": lambda *given, **more: [canned.room_row("decode-0", str(room)) for room in range(3)]})
    for number in range(100):
        start(f"worker-{number}", {"rooms": refuse})
    (result,) = asyncio.run(_used(mcp_server.make_server([]), calls(("rooms_ls", {}))))
    assert len(result.structured_content["data"]) == 3
    shown = len(result.structured_content["errors"])
    assert 0 < shown < 100
    assert f"{shown} of 100 entries of errors are shown" in text(result)
    assert "of data are shown" not in text(result)


def test_a_tool_imports_nothing_from_the_current_directory(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("decode-0")
    (tmp_path / "click.py").write_text("raise SystemExit('click.py of the current directory')")
    monkeypatch.setenv("PYTHONPATH", str(Path(kvctl.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    (result,) = asyncio.run(_used(mcp_server.make_server([]), calls(("agents", {}))))
    assert [row["agent"] for row in result.structured_content["data"]] == ["decode-0"]


def test_a_command_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch, socket_directory: Path) -> None:
    monkeypatch.setattr(mcp_server, "TIME_LIMIT_S", 0.5)  # longer than a start, which asyncio must not cancel
    monkeypatch.setattr(mcp_server, "KVCTL", (sys.executable, "-c", "import time; time.sleep(60)"))
    (result,) = asyncio.run(_used(mcp_server.make_server([]), calls(("status", {}))))
    assert (result.is_error, text(result)) == (
        True,
        "kvctl status did not end within 0.5 s: choose fewer agents with label",
    )


def test_labels_of_a_call_narrow_those_of_the_server_and_its_context(start: Any, surroundings: None) -> None:
    for name in ("prefill-0", "decode-0"):
        start(name)
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "kvctl" / "contexts.json"
    Contexts(path, named={"sending": {"labels": ["role=prefill"]}}).save()
    wanted = [("agents", {}), ("agents", {"label": ["role=prefill"]}), ("agents", {"label": ["role=decode"]})]
    for options in (("-l", "role=prefill"), ("-c", "sending")):
        *answered, refused = over_stdio(calls(*wanted), *options)
        assert [[row["agent"] for row in each.structured_content["data"]] for each in answered] == [["prefill-0"]] * 2
        assert (refused.is_error, "no agent has both role=prefill and role=decode" in text(refused)) == (True, True)


def test_the_fleet_is_that_of_the_servers_options() -> None:
    (result,) = over_stdio(calls(("doctor", {})), "--from", "docs/figures/dead-peer.kvrec")
    assert "KV_PEER_LOST" in {row["code"] for row in result.structured_content["data"]}
