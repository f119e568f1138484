"""`kvctl help` and the help of every command: the examples work, and the global options are listed once."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from kvctl.cli import cli
from kvctl.commands.options import GlobalOptions
from tests.support.cli_commands import commands

POINTER = "Global options (-e, -l, -o, --filter, -w, --from, ...): kvctl help options"
# Characters that the shell interprets.
_END = re.compile(r"\s(?:\||>|&&|\|\|)\s")


ALL = {path: each for path, each in commands().items() if isinstance(each, GlobalOptions)}
EXAMPLES = [(path, line) for path, command in {(): cli, **ALL}.items() for _, line in command.examples]
every = pytest.mark.parametrize("path", ALL, ids=" ".join)
# They start fleets, need a terminal, wait, or change agents; they are tested elsewhere.
NOT_RUN = {
    *("top", "bench", "tune", "preflight", "demo", "mcp"),
    *("wait", "drain", "resume", "key", "context", "logs"),
}
ACTS = {("rooms", "abort"), ("staging", "release"), ("config", "set"), ("peers", "probe"), ("peers", "forget")}


def words_of(line: str) -> list[str]:
    name, *words = shlex.split(_END.split(line)[0])
    assert name == "kvctl"
    return words


def target(words: list[str], kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """Returns the command that the words call."""
    reached: list[click.Command] = []
    with monkeypatch.context() as patch:
        patch.setattr(click.Command, "invoke", lambda self, ctx: reached.append(self))
        outcome = kvctl(*words)
    assert (outcome.code, outcome.err) == (0, "")
    return reached[-1]


@pytest.mark.parametrize(("path", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_can_be_typed(
    path: tuple[str, ...], line: str, kvctl: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = words_of(line)
    for word in words:
        if re.fullmatch(r"[\w-]+\.[\w.]+", word):
            Path(word).touch()
    found = target(words, kvctl, monkeypatch)
    if path and "--from" not in words and path != ("help",) and path != ("record",):
        assert found is ALL[path], "an example of another command"


@pytest.fixture
def files(fleet: Any, kvctl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes the files that the examples read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCTL_TIMEOUT", "30s")
    assert kvctl("record", "fleet.kvrec").code == 0
    assert kvctl("record", "incident.kvrec").code == 0


def test_examples_that_read_show_something(
    files: None, toy_codes: None, kvctl: Any, canned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with the fleet of fixed answers, which has other room numbers."""
    ran = 0
    for path, line in EXAMPLES:
        words = words_of(line)
        alive = not any("://" in word or word in {"-w", "--for"} for word in words)
        if path[:1] in {(name,) for name in NOT_RUN} or path in ACTS or not alive or words[0] in NOT_RUN:
            continue
        replaced = [
            {"7": canned.ROOM, "KV_PEER_LOST": "ring_full", "ring_pinned": "ring_full"}.get(w, w) for w in words
        ]
        replaced = [re.sub("KV_LANE_SLOW|KV_CLOCK_SKEW|KV_PEER_LOST", "KV_RING_FULL", word) for word in replaced]
        outcome = kvctl(*replaced)
        assert outcome.code in {0, 1, 2 if path[:1] == ("check",) else 0}, (line, outcome.err)
        assert outcome.out or "--filter" in words, line
        ran += 1
    assert ran > 40


# ---- the global options ------------------------------------------------------------------------------------------


def test_they_are_listed_in_two_places(kvctl: Any) -> None:
    listed = kvctl("help", "options")
    assert (listed.code, listed.err) == (0, "")
    for option in ("--endpoint", "--server-key", "--filter", "--watch", "--from", "--verbose"):
        assert option in listed.out
    assert listed.out in kvctl("--help").out
    assert POINTER not in kvctl("--help").out


# ---- kvctl help --------------------------------------------------------------------------------------------------


@every
def test_help_prints_what_the_option_prints(path: tuple[str, ...], kvctl: Any) -> None:
    assert kvctl("help", *path) == kvctl(*path, "--help")


def test_help_alone_lists_the_commands(kvctl: Any) -> None:
    assert kvctl("help").out == kvctl("--help").out == kvctl().out


# ---- -o ----------------------------------------------------------------------------------------------------------
