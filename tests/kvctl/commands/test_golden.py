"""Output of the commands, byte for byte. `UPDATE_GOLDEN=1` rewrites the files: then read the diff.

Three commands, whose views differ most, are printed in every format. The others share the renderer: all their columns
are compared once, in a wide table, the choice of columns at other widths in one file, and their JSON with its schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import click
import pytest

from tests.support.cli_commands import commands

COMMANDS = {
    "status": ("status",),
    # Round trips and clocks differ between calls.
    "agents": ("agents", "--columns", "agent,state,role,uptime,version,pid,incarnation,protocol,level,capabilities"),
    "rooms": ("rooms", "ls"),
    "history": ("rooms", "history"),
    "slow": ("rooms", "slow"),
    # Ages differ between calls.
    "failed": ("rooms", "failed", "--columns", "room,failed_at,rank,code,text,after,agents,waits_for,bytes,nonce"),
    "room": ("rooms", "show", "18446744073709551615"),
    "staging": ("staging", "show"),
    "staging-map": ("staging", "map"),
    "layers": ("layers",),
    "peers": ("peers", "show"),
    "peers-matrix": ("peers", "matrix"),
    "peers-cost": ("peers", "cost", "--tokens", "4096"),
    "peers-diff": ("peers", "diff", "prefill-1", "decode-1"),
    "nics": ("nics",),
    "bootstrap": ("bootstrap",),
    "metrics": ("metrics", "show"),
    "metrics-schema": ("metrics", "schema"),
    "events": ("events",),
    "config": ("config", "show"),
    "config-origin": ("config", "show", "--origin"),
    "config-explain": ("config", "explain", "copy_threads"),
    "contexts": ("context", "ls"),
}
# A summary above a table, sections, a drawing.
IN_EVERY_FORMAT = ("status", "room", "peers-matrix")
CODES = {"peers-diff": 1}
# Tested elsewhere: their output depends on the machine or the time, they have other formats, or they change agents.
NOT_HERE = {
    ("version",),
    ("stacks",),
    ("check",),
    ("health",),
    ("doctor",),
    ("logs",),
    ("wait",),
    ("drain",),
    ("resume",),
    ("rooms", "abort"),
    ("staging", "release"),
    ("config", "set"),
    ("preflight",),
    ("peers", "probe"),
    ("peers", "forget"),
    ("hosts", "ls"),
    ("hosts", "show"),
}
SUFFIXES = {"table": "-pipe.txt", "tsv": ".tsv", "json": ".json", "jsonl": ".jsonl", "csv": ".csv"}
# The error bound of a clock, in the table of a room's ranks and in its JSON.
_MEASURED = re.compile(r" +\d[\d.]* [µm]s$", re.MULTILINE)
_TITLES = re.compile(r"(?=.*[A-Z]{2})[^a-z=,]+")
_CLOCK = re.compile(r'("?\b(?:generated_at_ns|offset_ns|error_ns|clock_offset_ns|clock_error_ns)"?: ?)-?\d+')

Golden = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def patience(surroundings: None, now: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allows a busy machine to answer late."""
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")


def printed(name: str, outcome: Any) -> str:
    """Returns the output of a successful call, without values that differ between calls."""
    code = CODES.get(name, 0)
    assert (outcome.code, bool(outcome.err)) == (code, bool(code)), outcome.err
    text = str(outcome.out)
    if name == "room" and "CLOCK ±\n" in text:
        head, middle, rest = text.partition("CLOCK ±\n")
        ranks, gap, tail = rest.partition("\n\n")
        text = head + middle + _MEASURED.sub("  (measured)", ranks) + gap + tail
    if name != "peers":
        text = _CLOCK.sub(r"\g<1>0", text)
    return re.sub(r'("?generated_at_ns"?: ?)\d+', r"\g<1>0", text)


@pytest.fixture
def context(kvctl: Any) -> None:
    """Contexts for `kvctl context` to list."""
    assert kvctl("context", "add", "prod", "-e", "tcp://a:7000", "-e", "tcp://b:7000", "-l", "role=decode").code == 0
    assert kvctl("context", "add", "lab", "--timeout", "5s").code == 0


def test_all_columns(fleet: Any, context: None, kvctl: Any, golden: Golden) -> None:
    for name, args in COMMANDS.items():
        golden(f"{name}-wide.txt", printed(name, kvctl(*args, "-o", "wide")))


def test_every_format(fleet: Any, context: None, kvctl: Any, terminal: Any, golden: Golden) -> None:
    for name in IN_EVERY_FORMAT:
        for output, suffix in SUFFIXES.items():
            golden(f"{name}{suffix}", printed(name, kvctl(*COMMANDS[name], "-o", output)))
    for name, width in product(IN_EVERY_FORMAT, (80, 120)):
        terminal(width)
        golden(f"{name}-{width}.txt", printed(name, kvctl(*COMMANDS[name], "-o", "table")))


def titles(text: str) -> list[str]:
    """Returns the titles of the tables' columns in an output, and the lines that name the hidden ones."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return [line for line in lines if _TITLES.fullmatch(line) or line.startswith("hidden at")]


def test_columns(fleet: Any, context: None, kvctl: Any, terminal: Any, golden: Golden) -> None:
    found = [f"{name} in a pipe: {line}" for name in COMMANDS for line in titles(kvctl(*COMMANDS[name]).out)]
    for width in (80, 120):
        terminal(width)
        found += [f"{name} at {width}: {line}" for name in COMMANDS for line in titles(kvctl(*COMMANDS[name]).out)]
    golden("columns.txt", "\n".join([*sorted(found), ""]))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("nics-120.txt", ("nics", "-o", "table")),  # shown in the docs
        ("metrics.prom", ("metrics", "-o", "prom")),
        ("status-columns.json", ("status", "-o", "json", "--columns", "agent,p50,ring")),
        ("status-colour.txt", ("status", "-o", "table", "--color", "always")),
        ("peers-matrix-colour.txt", ("peers", "matrix", "-o", "table", "--color", "always")),
    ],
)
def test_special_formats(
    name: str, args: tuple[str, ...], fleet: Any, kvctl: Any, terminal: Any, golden: Golden
) -> None:
    terminal(120)
    golden(name, printed(name, kvctl(*args)))


def test_no_view_is_forgotten() -> None:
    """Every command with a view is in one of the lists above."""
    listed = {args[:length] for args in COMMANDS.values() for length in (1, 2)} | NOT_HERE
    for path, command in commands().items():
        if not isinstance(command, click.Group):
            assert getattr(command, "view", None) is None or path in listed or path[:1] in NOT_HERE, path


def test_a_pipe_gets_what_a_very_wide_terminal_shows(
    fleet: Any, context: None, kvctl: Any, terminal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # drawings need a width; tables do not
    piped = {name: printed(name, kvctl(*args)) for name, args in COMMANDS.items()}
    assert [name for name, text in piped.items() if "at this width" in text] == []
    terminal(400)
    assert piped == {name: printed(name, kvctl(*args)) for name, args in COMMANDS.items()}
