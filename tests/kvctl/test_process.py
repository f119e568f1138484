"""The `kvctl` process: imports, start time, exit, and output on a terminal."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvctl
from kvctl.lab.ranks.process import PROGRAM

KVCTL = (sys.executable, "-m", "kvctl")
AtBest = Callable[[Callable[[], float], float], None]
HEAVY = ("torch", "numpy", "textual", "nixl", "transformers")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVCTL, *args], capture_output=True, text=True, timeout=250, env={**os.environ, **environment}, check=False
    )


def imported(*args: str) -> set[str]:
    """Returns the names of the modules that a `kvctl` process has imported at its end."""
    code = (
        "import sys, json, io\n"
        "from kvctl.cli import run\n"
        f"code = run({list(args)!r})\n"
        "print(json.dumps([int(code), sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0
    return set(modules)


def test_help_and_status_import_nothing_heavy(fleet: Any) -> None:
    for args in (("--help",), ("status",), ("status", "-o", "table"), ("rooms", "-o", "json")):
        assert not imported(*args) & set(HEAVY), args


def test_version_and_help_open_no_socket_library_and_draw_nothing() -> None:
    for args in (("--version",), ("--help",)):
        assert not imported(*args) & {"zmq", "rich", "orjson", *HEAVY}, args


def seconds(*command: str) -> float:
    """Returns the duration of a process."""
    started = time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    return time.perf_counter() - started


def test_startup_is_quick_beside_the_interpreter_alone(at_best: AtBest) -> None:
    """The limit is 150 ms on an idle machine; a busy one slows the bare interpreter equally."""
    bare = statistics.median(seconds(sys.executable, "-c", "pass") for _ in range(5))
    at_best(lambda: seconds(*KVCTL, "--version"), max(0.15, 8 * bare))


def test_without_agents_status_ends_within_a_second(at_best: AtBest) -> None:
    at_best(lambda: seconds(*KVCTL, "status"), 1)
    done = run("status")
    assert (done.returncode, done.stdout) == (3, "")
    assert "kvctl demo" in done.stderr


def test_a_reader_that_leaves_is_met_quietly(fleet: Any) -> None:
    shell = f"{sys.executable} -m kvctl COMMAND | head -n 1; echo ${{PIPESTATUS[0]}}"
    for command in ("rooms", "metrics -o prom", "status -w 0.01", "events -o jsonl"):
        done = subprocess.run(
            ["bash", "-c", shell.replace("COMMAND", command)], capture_output=True, text=True, timeout=250, check=False
        )
        assert done.stderr == "", command
        assert done.stdout.splitlines()[-1] == "0", command


@pytest.mark.parametrize("module", ["kvctl.cli", "click", "kvctl.exit_codes", "kvctl.commands.status"])
def test_interrupting_it_while_it_imports_is_quiet(module: str) -> None:
    """Ctrl-C directly after the start interrupts the imports."""
    code = f"""
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["status"]
runpy.run_module("kvctl", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_interrupting_exits_130_and_keeps_what_was_printed(fleet: Any) -> None:
    process = subprocess.Popen(
        [*KVCTL, "status", "-w", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    header, first = process.stdout.readline(), process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == ""
    assert header.split()[:2] == ["TIME", "UP"]
    assert first.split()[1] == "4"


def text(terminal: Any) -> str:
    """Returns the output of a process on a terminal at its end."""
    assert terminal.rest() == 0
    return str(terminal.seen).replace("\r\n", "\n")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colour_can_be_declined(environment: dict[str, str], fleet: Any, on_terminal: Any) -> None:
    shown = text(on_terminal("rooms", environment=environment))
    assert "\x1b" not in shown
    assert "WaitingForInput" in shown
    assert all(len(line) <= 100 for line in shown.splitlines()[:-1])


def test_a_rank_imports_nothing_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('argparse.py of the current directory')")
    environment = {**os.environ, "PYTHONPATH": str(Path(kvctl.__file__).parents[1])}
    done = subprocess.run([*PROGRAM, "--help"], env=environment, cwd=tmp_path, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_watching_status_on_a_terminal_repeats_its_header_every_20_lines(fleet: Any, on_terminal: Any) -> None:
    watched = on_terminal("status", "-w", "0.01", "--color", "never")
    watched.until("TIME", times=2)
    assert watched.end(signal.SIGINT) == 130
    lines = watched.seen.splitlines()
    heads = [number for number, line in enumerate(lines) if line.lstrip().startswith("TIME")]
    assert heads[:2] == [0, 21]
