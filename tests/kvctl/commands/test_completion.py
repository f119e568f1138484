"""Completion in real shells with live agents, without output on stderr."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl.commands import completion
from kvctl.commands.completion import FILES, VARIABLE
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60


Ask = Callable[..., dict[str, str]]


@pytest.fixture
def ask(kvctl: Any, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Returns the completions of a command line: value to help; fails on any other output."""

    def call(*words: str, **environment: str) -> dict[str, str]:
        line = {"COMP_WORDS": shlex.join(["kvctl", *words]), "COMP_CWORD": str(len(words))}
        with monkeypatch.context() as patch:
            for name, value in {VARIABLE: "zsh_complete", **line, **environment}.items():
                patch.setenv(name, value)
            outcome = kvctl()
        assert (outcome.code, outcome.err) == (0, "")
        fields = outcome.out.rstrip("\n").split("\n") if outcome.out.strip() else []
        rows = zip(fields[::3], fields[1::3], fields[2::3], strict=True)
        return {(value if kind == "plain" else kind): text for kind, value, text in rows}

    return call


@pytest.mark.parametrize("shell", FILES)
def test_the_files_are_what_the_command_prints(shell: str, kvctl: Any) -> None:
    outcome = kvctl("completion", shell)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (ROOT / "completions" / FILES[shell]).read_text(), "run make docs"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ro",), ["rooms"]),
        (("rooms", "s"), ["show", "slow"]),
        (("-o", "json", "rooms", "hi"), ["history"]),
        (("rooms", "--sta"), ["--state"]),
        (("rooms", "--state", "tr"), ["transferring"]),
        (("peers", "show", "--color", "a"), ["auto", "always"]),
        (("rooms", "--columns", "room,state_"), ["room,state_age"]),
        (("rooms", "ls", "--sort-by", "-roo"), []),
        (("rooms", "ls", "--sort-by=state,-roo"), ["state,-room"]),
        (("config", "show", "--columns", "key,val"), ["key,value"]),
        (("status", "--columns", "state,sta"), []),
        (("record", "x"), ["file"]),
        (("help", "ro"), ["rooms"]),
        (("help", "rooms", "a"), ["abort"]),
        (("help", "op"), ["options"]),
        (("help", "rooms", "op"), []),
        (("help", "status", ""), []),
        (("completion", "z"), ["zsh"]),
        (("nonsense", ""), []),
        (("rooms", "nonsense", ""), []),
        (("rooms", "--filter", "age>"), []),
    ],
)
def test_commands_options_and_values(words: tuple[str, ...], expected: list[str], ask: Ask) -> None:
    assert list(ask(*words)) == expected


def test_every_command_has_a_word_of_help(ask: Ask) -> None:
    found = ask("")
    assert found["rooms"].startswith("Active")
    assert all(found.values())


def test_agents_and_rooms_are_the_living_ones(
    fleet: Any, leave_stale: Any, canned: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = leave_stale("dead").parent
    monkeypatch.setattr(completion, "_ANSWER_NS", (60 * 10**9,))  # a busy machine answers late
    assert list(ask("-e", "")) == sorted(fleet)
    assert list(ask("peers", "diff", "prefill-0", "dec")) == ["decode-0", "decode-1"]
    found = ask("rooms", "show", "")
    assert set(found) == {canned.ROOM, "5", "6", "7"}
    assert "Failed on " in found["6"]
    assert list(ask("rooms", "show", "18")) == [canned.ROOM]
    assert list(ask("-e", "nobody", "rooms", "show", "")) == []
    assert list(ask("drain", "", KVCTL_ENDPOINT=f"ipc://{directory}/decode-1.sock")) == ["decode-1"]


def test_a_hung_agent_and_a_broken_file_are_met_with_silence(start: Any, hang: Any, tmp_path: Path, ask: Ask) -> None:
    start("decode-0")
    hang("hung")
    deadline = time.monotonic() + PATIENCE_S
    while "7" not in ask("rooms", "show", ""):
        assert time.monotonic() < deadline
    (tmp_path / "kvctl").mkdir()
    (tmp_path / "kvctl" / "config.toml").write_text("= =")
    broken = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert list(ask("rooms", "show", "", **broken)) == []
    assert list(ask("-c", "", **broken)) == []
    assert list(ask("ro", **broken)) == ["rooms"]
    assert list(ask("rooms", "show", "", KVCTL_SOCKET_DIR="/nowhere/at/all")) == []


def test_contexts_are_known(kvctl: Any, ask: Ask) -> None:
    assert kvctl("context", "add", "prod", "-e", "x").code == 0
    assert list(ask("-c", "")) == ["prod"]
    assert list(ask("context", "use", "p")) == ["prod"]


def test_nothing_heavy_is_imported_for_the_name_of_a_command() -> None:
    code = (
        "import sys\nfrom kvctl.cli import run\nrun([])\n"
        "print(*sorted({'zmq', 'orjson', 'rich', 'textual', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, VARIABLE: "zsh_complete", "COMP_WORDS": "kvctl ro", "COMP_CWORD": "1"},
        check=True,
    )
    assert done.stdout.splitlines()[1] == "rooms"
    assert done.stdout.splitlines()[-1] == ""


class Typed(Terminal):
    """A shell on a pseudo-terminal."""

    def __init__(self, *command: str, **environment: str) -> None:
        plain = {"TERM": "dumb", "HISTFILE": "/dev/null", "PS1": "> "}
        super().__init__(*command, size=(400, 24), environment={**plain, **environment}, start_new_session=True)

    def completes(self, typed: str, shown: str) -> None:
        """Types the text, and TAB until the line ends in `shown`; on a busy machine agents may miss the first TAB."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.press(f"\x15{typed}\t")
            if self.passes(shown, 10):
                break
            assert time.monotonic() < deadline, f"{typed!r} does not become {shown!r}: {self.seen!r}"
        self.press("\x15")


@pytest.fixture
def path_with_kvctl(tmp_path: Path) -> str:
    """A PATH that finds this `kvctl`."""
    program = tmp_path / "bin" / "kvctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvctl "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


def shell(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_bash(fleet: Any, path_with_kvctl: str, canned: Any) -> None:
    with Typed(shell("bash"), "--norc", "--noprofile", "-i", PATH=path_with_kvctl) as bash:
        bash.press("source <(kvctl completion bash); echo rea''dy\n")
        assert bash.passes("ready\r\n")
        bash.completes("kvctl vers", "version ")
        bash.completes("kvctl rooms show 18", f"{canned.ROOM} ")
        bash.completes("kvctl -e prefill-0 agents --columns agent,ve", "agent,version ")


def test_values_that_a_shell_would_interpret_are_left_out(
    start: Any, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_agents", lambda *_, **__: [SimpleNamespace(host=each) for each in ("n1", "n;ls")])
    assert list(ask("hosts", "show", "")) == ["n1"]
