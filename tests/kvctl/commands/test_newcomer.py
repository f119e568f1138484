"""First steps of a new user in a real shell: each works or prints one line with the next step."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.commands.registry import COMMANDS as COMMANDS_BY_NAME
from kvctl.commands.registry import SECTIONS
from kvctl.commands.settings import OUTPUTS
from kvctl_agent.errors import AdminError
from tests.support.admin_server import AdminServer

PATIENCE = "30s"  # a busy machine answers late

Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """Runs a line in bash with `kvctl` on PATH; the exit code is that of the whole pipeline."""
    program = tmp_path / "bin" / "kvctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvctl "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"

    def run(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"],
            capture_output=True,
            text=True,
            timeout=90,
            env={**os.environ, "PATH": path, "KVCTL_TIMEOUT": PATIENCE, **environment},
            check=False,
        )

    return run


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")


def test_kvctl_alone_shows_what_there_is(shell: Shell) -> None:
    done = shell("kvctl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "status" in done.stdout
    assert "demo" in done.stdout


def test_the_help_lists_every_command_once(shell: Shell) -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(COMMANDS_BY_NAME)
    shown = re.findall(r"^  (\w+)  +\S", shell("kvctl --help").stdout, re.MULTILINE)
    assert shown == listed


def test_status_without_agents_says_how_to_start_some(shell: Shell) -> None:
    done = shell("timeout 30 kvctl status")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Start some here: kvctl demo" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_slip_of_the_finger_gets_a_suggestion(shell: Shell) -> None:
    done = shell("kvctl stauts")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'kvctl status'?" in done.stderr


def test_json_goes_to_jq_and_tables_to_grep(shell: Shell, fleet: Any, canned: Any) -> None:
    need("jq")
    done = shell("kvctl rooms -o json | jq -r '.data[].room' | sort -u")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [canned.ROOM, "7"]
    done = shell("kvctl rooms | grep -c WaitingForInput")
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
    for line in (
        "kvctl rooms | awk -F '  +' 'NR > 1 {print $4}' | sort -u",
        "kvctl rooms -o tsv | cut -f 4 | tail -n +2 | sort -u",
    ):
        assert shell(line).stdout.split() == ["Transferring", "WaitingForInput"]


def test_no_colour_without_being_asked_for_it(shell: Shell, fleet: Any) -> None:
    assert "\x1b" not in shell("kvctl status -o table").stdout
    assert "\x1b" in shell("kvctl status -o table --color always").stdout
    need("script")
    line = "script -qec 'kvctl rooms' /dev/null"
    assert "\x1b[" in shell(line, TERM="xterm-256color").stdout
    assert "\x1b" not in shell(line, TERM="xterm-256color", NO_COLOR="1").stdout


def test_from_cron_there_is_no_home_and_no_terminal(shell: Shell, fleet: Any) -> None:
    directory = os.environ["KVCTL_SOCKET_DIR"]
    bare = f"env -i PATH=/usr/bin:/bin KVCTL_SOCKET_DIR={directory} KVCTL_TIMEOUT={PATIENCE} {sys.executable} -m kvctl"
    done = shell(f"cd {Path(__file__).parents[3]}; {bare} agents -o tsv --columns agent,state < /dev/null")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\tok\n") == 4
    done = shell(f"cd {Path(__file__).parents[3]}; {bare} check all < /dev/null; echo $?")
    assert done.stdout.splitlines()[-1] in {"0", "1", "2"}
    assert done.stderr == ""


def test_two_agents_of_one_name_are_refused_and_the_first_is_unharmed(shell: Shell, start: Any, canned: Any) -> None:
    first = start("decode-0")
    second = AdminServer("decode-0", canned.refusals(), lambda: canned.hello("decode-0"), first.path.parent)
    with pytest.raises(AdminError, match="decode-0"):
        second.start()
    second.close()
    done = shell("kvctl agents --columns agent,state")
    assert (done.returncode, done.stdout) == (0, "AGENT     STATE\ndecode-0  ok\n")


def test_an_agent_of_another_version_is_named_and_the_others_answer(shell: Shell, start: Any) -> None:
    start("decode-0")
    start("decode-1", version="9.9.9")
    start("newer", protocol=[2, 3])
    done = shell("kvctl status --columns agent")
    assert (done.returncode, done.stdout) == (7, "AGENT\ndecode-0\ndecode-1\nnewer\n")
    assert "newer: serves admin protocol 2 to 3, this kvctl speaks 1 to 1: update kvctl" in done.stderr
    done = shell("kvctl version --agents --columns component,version")
    assert "decode-1   9.9.9\n" in done.stdout
    assert shell("kvctl -e newer status").returncode == 6


def test_sizes_that_do_not_go_together_are_explained(shell: Shell) -> None:
    done = shell("kvctl bench --prefill-tp 3 --decode-tp 7")
    assert (done.returncode, done.stdout) == (2, "")
    assert "8 KV heads cannot be laid out over tp 3: 8 % 3 = 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_was_seen_is_kept_and_read_again(shell: Shell, fleet: Any, tmp_path: Path) -> None:
    before = shell("kvctl rooms -o json | jq -c '.data | sort_by(.agent, .room)'").stdout
    bundle = tmp_path / "b.tar.zst"
    done = shell(f"kvctl debug bundle --redact {bundle} -q")
    assert done.returncode == 0, done.stderr
    done = shell(f"kvctl --from {bundle} rooms -o json | jq -c '.data | sort_by(.agent, .room)'")
    assert (done.returncode, done.stdout) == (0, before.replace("cmpl-7f3a", "request-1"))
    assert json.loads(before)


# ---- closed or full output streams ---------------------------------------------------------------------------

COMMANDS = (
    "status", "agents", "rooms", "rooms history", "rooms slow", "rooms show 18446744073709551615", "staging",
    "staging map", "layers", "peers", "peers matrix", "peers diff prefill-0 decode-0", "bootstrap", "metrics", "events",
    "stacks", "config show", "config show --origin", "config explain copy_threads", "context ls", "version --agents",
)  # fmt: skip
CASES = [(command, OUTPUTS[number % len(OUTPUTS)]) for number, command in enumerate(COMMANDS)]
# One interpreter that forks a child for each line of its input: faster than a new process, with the same exit.
CHILDREN = """
import os, sys
from kvctl.cli import main
from kvctl.commands.registry import load
import orjson, zmq, kvctl.render.terminal, kvctl.commands.queries  # once, not in each child
for name in "status agents rooms staging layers peers bootstrap metrics events stacks config context version".split():
    load(name)
for line in sys.stdin.read().splitlines():
    words = line.split()
    child = os.fork()
    if child == 0:
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(3, f"{status}\\t{line}\\n".encode())
else:
    os._exit(0)
os.close(3)
main(words)
"""


@pytest.mark.parametrize(
    ("sink", "code", "said"),
    [
        (">&-", 0, ""),
        ("> /dev/null 2>&-", 0, ""),
        ("> /dev/full", 1, "kvctl: cannot write to stdout: No space left on device"),
        ("> >(exec true)", 0, ""),
        ("| head -n 1 > /dev/null", 0, ""),
    ],
)
def test_whatever_stands_at_the_other_end(
    sink: str, code: int, said: str, shell: Shell, fleet: Any, tmp_path: Path
) -> None:
    """At most one line on stderr, no traceback, and the right exit code."""
    program, cases, codes = tmp_path / "children.py", tmp_path / "cases", tmp_path / "codes"
    program.write_text(CHILDREN)
    cases.write_text("".join(f"{command} -o {output}\n" for command, output in CASES))
    done = shell(f"{sys.executable} {program} 3> {codes} < {cases} {sink}")
    ended = [each.split("\t") for each in codes.read_text().splitlines()]
    assert len(ended) == len(CASES)
    assert [line for status, line in ended if status != str(code)] == []
    lines = done.stderr.splitlines()
    assert [each for each in lines if not said or not each.startswith(said)] == []
    assert len(lines) == (len(CASES) if said else 0)
