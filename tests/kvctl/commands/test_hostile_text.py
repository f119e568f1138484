"""Unprintable text of agents never reaches the output: every command and format, on stdout and stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from kvctl.commands.options import GlobalOptions
from kvctl.commands.settings import OUTPUTS
from kvctl_agent.contract.admin import ErrorCode
from tests.support.answers import refusal
from tests.support.cli_commands import commands

# ESC and a title for the terminal, one-byte CSI, a backspace, NEL, overrides and isolates of direction, zero width,
# a tag character, and a carriage return.
HOSTILE = "x\x1b]0;owned\x07\x9b31m\x08\x85\u202e\u2066\u200b\ufeff\U000e0041\r"
_OUR_COLOURS = re.compile("\x1b\\[[0-9;]*m")
# Values of enumerations, which agents do not choose freely.
ENUMERATED = {"role", "state", "severity", "level", "stage", "room", "nonce", "engine"}
ARGUMENTS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("rooms", "show"): ("18446744073709551615",),
    ("rooms", "abort"): ("7", "--yes"),
    ("staging", "release"): ("decode-0:7", "--yes"),
    ("peers", "diff"): ("prefill-0", "decode-1"),
    ("peers", "probe"): ("prefill-0", "decode-0"),
    ("config", "explain"): ("copy_threads",),
    ("config", "set"): ("copy_threads", "2", "--yes"),
    ("drain",): ("decode-0", "--yes"),
    ("resume",): ("decode-0", "--yes"),
    ("health", "explain"): ("KV_RING_FULL",),
    ("wait",): ("--for", "ready"),
}
# They read no agent, start copy_threads, write files, or answer requests on stdin.
NOT_HERE = {*("bench", "demo", "tune", "preflight", "top", "record"), *("completion", "help", "key", "context", "mcp")}


def poisoned(value: Any, key: str = "") -> Any:
    """Returns the value with control characters in every free text, including keys of mappings."""
    match value:
        case str():
            return value if key in ENUMERATED else value + HOSTILE
        case dict():
            return {name: poisoned(item, name) for name, item in value.items()}
        case list():
            return [poisoned(item, key) for item in value]
    return value


LISTED = [
    path
    for path, command in commands().items()
    if path[0] not in NOT_HERE and isinstance(command, GlobalOptions) and not isinstance(command, click.Group)
]


@pytest.fixture
def hostile_fleet(start: Any, canned: Any) -> None:
    for name in canned.FLEET:
        handlers: dict[str, Any] = {
            command: lambda args, handler=handler: poisoned(handler(args))
            for command, handler in canned.answers(name, failed=True).items()
        }
        if name == "decode-1":
            handlers["events"] = handlers["layers"] = handlers["metrics"] = _refuse
        start(name, handlers, version=f"0.1.0{HOSTILE}", incarnation=HOSTILE, capabilities=[HOSTILE])


_refuse = refusal(ErrorCode.NOT_PERMITTED, HOSTILE)


def raw(text: str) -> list[str]:
    return [each for each in text if not each.isprintable() and each not in "\n\t"]


def test_no_format_prints_raw_text_of_an_agent(
    hostile_fleet: None, toy_codes: None, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a bundle is written where kvctl runs
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    for path in LISTED:
        for output in (*OUTPUTS, *(("prom",) if path[0] in {"metrics", "check"} else ())):
            done = kvctl(*path, *ARGUMENTS.get(path, ()), "-o", output)
            assert raw(done.out + done.err) == [], (path, output, done.out, done.err)
            if output == "json" and done.out:
                json.loads(done.out)
        coloured = kvctl(*path, *ARGUMENTS.get(path, ()), "-o", "table", "--color", "always").out
        assert raw(_OUR_COLOURS.sub("", coloured)) == [], path
