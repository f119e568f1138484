"""MCP server of `kvctl mcp`. Each tool is a command that only reads, as click declares it.

A call runs the command in a process of its own, with `-o json`. Its document is the result, and its messages on stderr
are the text of an error.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import anyio
import click
import jsonschema
import mcp_types as types
import orjson
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from kvctl.commands.options import GlobalOptions
from kvctl.commands.registry import load
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract import VERSION

# A command is reachable only if it is listed here: none that changes, starts or writes something, or runs on.
READING = (
    "status", "hosts ls", "hosts show", "agents", "rooms ls", "rooms show", "rooms failed", "rooms history",
    "rooms slow", "staging show", "staging map", "nics", "layers", "peers show", "peers matrix", "peers diff",
    "peers cost", "metrics show", "metrics schema", "events", "bootstrap", "stacks", "doctor", "health show",
    "health explain", "health codes", "config show", "config explain", "version",
)  # fmt: skip
# Parameters that remove something, or are about something else than the fleet, by command: an assistant must not reach
# any server that it names. No tool has a parameter that names a file.
HIDDEN = {"agents": {"prune"}, "doctor": {"command", "urls"}}
# Global options that a tool has; those that choose the fleet are set when the server starts.
SHARED = {"labels", "filters", "sort_by"}
TIME_LIMIT_S = 45.0  # clients wait a minute
SIZE_LIMIT_BYTES = 60_000  # of a document, about 20,000 tokens
AT_ONCE = 4  # processes
KVCTL = (sys.executable, "-P", "-m", "kvctl")  # no module is imported from the current directory
INSTRUCTIONS = (
    "Reads the state of KV-cache transfers between prefill and decode workers of LLM servers. A room is the transfer "
    "of one request's KV cache. Begin with doctor or health_detail, which name causes and the next command; then "
    "rooms_failed, rooms_ls and rooms_show. Nothing can be changed: name commands that change something to a person."
)


def serve(fleet: Sequence[str]) -> None:
    """Serves on stdin and stdout until stdin ends; `fleet` as for `make_server`."""

    async def run() -> None:
        server = make_server(fleet)
        async with stdio_server() as (requests, replies):
            await server.run(requests, replies, server.create_initialization_options())

    anyio.run(run)


def make_server(fleet: Sequence[str]) -> Server[Any]:
    """Returns the server. `fleet`: options of `kvctl` that choose the agents or the recording."""
    tools = {tool.name: (path, tool) for path, tool in zip(READING, map(tool_of, READING), strict=True)}
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def list_tools(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[tool for _path, tool in tools.values()])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in tools:
            return _error(f"no tool {params.name!r}; there are: {', '.join(tools)}")
        path, tool = tools[params.name]
        try:
            jsonschema.validate(given := params.arguments or {}, tool.input_schema)
            command = [*KVCTL, *path.split(), *fleet, "-o", "json", *_arguments(path, given)]
            async with limiter:
                with anyio.fail_after(TIME_LIMIT_S):
                    done = await anyio.run_process(command, stdin=subprocess.DEVNULL, check=False)
        except jsonschema.ValidationError as error:
            return _error(f"{params.name}: {error.json_path.removeprefix('$.')}: {error.message}".replace(" $: ", " "))
        except TimeoutError:
            return _error(f"kvctl {path} did not end within {TIME_LIMIT_S:g} s: choose fewer agents with label")
        except (OSError, ValueError) as error:  # arguments that a process cannot have: too long, or with a NUL
            return _error(f"{params.name}: {error}")
        return _result(done.returncode, done.stdout, done.stderr.decode(errors="replace").strip()[:SIZE_LIMIT_BYTES])

    return Server("kvctl", version=VERSION, instructions=INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool)


def tool_of(path: str) -> types.Tool:
    """Returns the tool of a command, such as `rooms show`."""
    command = _command(path)
    parameters = dict(_parameters(path))
    text = inspect.cleandoc((command.help or "").replace("\b", ""))
    if command.view is not None:
        text += "\n\nColumns for filter and sort_by: " + ", ".join(column.name for column in command.view.columns)
    return types.Tool(
        name=path.replace(" ", "_"),
        title=f"kvctl {path}",
        description=text,
        input_schema={
            "type": "object",
            "properties": {name: _schema(parameter) for name, parameter in parameters.items()},
            "required": [name for name, parameter in parameters.items() if parameter.required],
            "additionalProperties": False,
        },
        annotations=types.ToolAnnotations(read_only_hint=True, open_world_hint=False),
    )


def _command(path: str) -> GlobalOptions:
    """Returns the command of a path such as `rooms show`."""
    name, *rest = path.split()
    command = load(name)
    for each in rest:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), each)
    assert isinstance(command, GlobalOptions)
    return command


def _parameters(path: str) -> Iterator[tuple[str, click.Parameter]]:
    """Yields the parameters that a tool has, by their names there."""
    command = _command(path)
    for parameter in command.params:
        if parameter in command.global_options:
            reachable = parameter.name in SHARED
        else:
            reachable = parameter.name not in HIDDEN.get(path, ()) and not isinstance(parameter.type, click.Path)
        if reachable:
            argument = isinstance(parameter, click.Argument) and parameter.metavar
            yield (argument or parameter.opts[-1].lstrip("-").replace("-", "_")).lower(), parameter


def _schema(parameter: click.Parameter) -> dict[str, Any]:
    kind = parameter.type
    schema: dict[str, Any] = {"type": "string"}
    if getattr(parameter, "is_flag", False):
        schema = {"type": "boolean"}
    elif isinstance(kind, click.IntRange):
        bounds = {"minimum": kind.min, "maximum": kind.max}
        schema = {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}
    elif isinstance(kind, click.Choice):
        schema = {"type": "string", "enum": list(kind.choices)}
    if getattr(parameter, "multiple", False):
        schema = {"type": "array", "items": schema}
    return schema | ({"description": text} if (text := getattr(parameter, "help", None)) else {})


def _arguments(path: str, given: dict[str, Any]) -> list[str]:
    """Spells out the parameters of a call so that no value is taken for an option."""
    options, arguments = [], ["--"]
    for name, parameter in _parameters(path):
        value = given.get(name)
        if isinstance(parameter, click.Argument):
            arguments += [] if value is None else [value]
        elif value is True:
            options.append(parameter.opts[-1])
        elif value is not None and value is not False:
            values = value if isinstance(value, list) else [value]
            # In JSON, 1.0 is an integer.
            options += [f"{parameter.opts[-1]}={int(each) if isinstance(each, float) else each}" for each in values]
    return [*options, *arguments]


def _result(code: int, output: bytes, messages: str) -> types.CallToolResult:
    """Returns what a command printed, shortened to the limit; an error if it answered nothing."""
    try:
        document: dict[str, Any] = orjson.loads(output)
    except orjson.JSONDecodeError:
        return _error(messages or f"kvctl ended with exit code {code}")
    if messages and not document["data"] and code not in (ExitCode.OK, ExitCode.PARTIAL):
        return _error(messages)
    notes = [messages] if messages else []
    whole = {part: document[part] for part in ("data", "errors")}
    while any(map(document.get, whole)) and (size := len(orjson.dumps(document))) > SIZE_LIMIT_BYTES:
        larger = max(whole, key=lambda part: len(orjson.dumps(document[part])))
        document[larger] = document[larger][: len(document[larger]) * SIZE_LIMIT_BYTES // size]
    for part, every in whole.items():
        if len(document[part]) < len(every):
            shown = f"{len(document[part])} of {len(every)} entries of {part} are shown"
            notes.append(f"{shown}, because all exceed {SIZE_LIMIT_BYTES:,} bytes: use filters, labels or limit")
    texts = [orjson.dumps(document).decode(), *notes]
    return types.CallToolResult(content=[_text(text=text) for text in texts], structured_content=document)


def _error(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[_text(text=text[:SIZE_LIMIT_BYTES])], is_error=True)


_text = partial(types.TextContent, type="text")
