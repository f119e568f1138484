"""First steps of a new user in a real shell: each works or prints one line with the next step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvctl.commands.settings import OUTPUTS

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


def test_from_cron_there_is_no_home_and_no_terminal(shell: Shell, fleet: Any) -> None:
    directory = os.environ["KVCTL_SOCKET_DIR"]
    bare = f"env -i PATH=/usr/bin:/bin KVCTL_SOCKET_DIR={directory} KVCTL_TIMEOUT={PATIENCE} {sys.executable} -m kvctl"
    done = shell(f"cd {Path(__file__).parents[3]}; {bare} agents -o tsv --columns agent,state < /dev/null")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\tok\n") == 4
    done = shell(f"cd {Path(__file__).parents[3]}; {bare} check all < /dev/null; echo $?")
    assert done.stdout.splitlines()[-1] in {"0", "1", "2"}
    assert done.stderr == ""


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
