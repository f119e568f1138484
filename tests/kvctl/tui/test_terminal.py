"""The real process on a pseudo-terminal: agents that die, a lost terminal, signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.terminal import Terminal

# Serves one agent with the fixed answers until it is killed.
AGENT = """
import importlib.util, sys, threading, time
spec = importlib.util.spec_from_file_location("canned", sys.argv[1])
canned = sys.modules["canned"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(canned)
from tests.support.admin_server import AdminServer
name, said = sys.argv[2:]
answers = {**canned.refusals(), **canned.answers(name)}
answers["status"] = lambda _: {**canned.status(name), "waiting_for": said or None}
server = AdminServer(name, answers, lambda: {**canned.hello(name), "incarnation": said})
server.start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def screen(on_terminal: Any) -> Callable[..., Terminal]:
    """Starts `kvctl top` on a pseudo-terminal."""

    def make(*args: str, before: Callable[[], Any] | None = None) -> Terminal:
        return on_terminal("top", *args, size=(110, 30), start_new_session=True, preexec_fn=before)

    return make


@pytest.fixture
def agent(socket_directory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Agents in processes of their own."""
    started: list[subprocess.Popen[str]] = []
    canned = Path(__file__).parents[1] / "conftest.py"

    def make(name: str, said: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, str(canned), name, said], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()
    for path in socket_directory.iterdir():
        path.unlink()


def test_a_killed_agent_grows_stale_and_comes_back(screen: Any, agent: Any) -> None:
    agent("prefill-0")
    victim = agent("decode-0")
    top = screen("--interval", "200ms")
    assert top.passes("decode-0")
    victim.kill()
    victim.wait()
    assert top.passes("decode-0 silent for")
    agent("decode-0", "its second life")
    assert top.passes("its second life")
    top.press("q")
    assert top.rest() == 0


def test_a_hanging_agent_does_not_stop_the_screen(screen: Any, agent: Any) -> None:
    agent("prefill-0")
    victim = agent("decode-0")
    top = screen("--interval", "200ms", "--timeout", "300ms")
    assert top.passes("decode-0")
    victim.send_signal(signal.SIGSTOP)
    assert top.passes("decode-0 silent for")
    top.press("5")
    assert top.passes("LAST ERROR")
    victim.send_signal(signal.SIGCONT)
    top.press("q")
    assert top.rest() == 0


@pytest.mark.parametrize("ignored", [False, True], ids=["as usual", "under nohup"])
def test_a_lost_terminal_ends_it(ignored: bool, screen: Any, fleet: Any) -> None:
    before = (lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if ignored else None
    top = screen("--interval", "200ms", before=before)
    assert top.passes("decode-0")
    top.hang_up()
    assert top.rest() in {128 + signal.SIGHUP, -signal.SIGHUP}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_signals_end_it(number: signal.Signals, screen: Any, fleet: Any) -> None:
    top = screen("--interval", "200ms")
    assert top.passes("decode-0")
    top.process.send_signal(number)
    assert top.rest() == 128 + number
    assert "\x1b[?1049l" in top.seen  # the terminal is as it was before


def test_control_c_leaves_like_quit(screen: Any, fleet: Any) -> None:
    top = screen("--interval", "200ms")
    assert top.passes("decode-0")
    top.press("\x03")
    assert top.rest() == 130


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((), "needs a terminal; without one: --snapshot FILE.svg"),
        (("--snapshot", "x.gif"), "the suffix determines the format, .svg, .txt"),
        (("--snapshot", "x.svg", "--size", "10x10"), "10x10 is not between 60x16"),
        (("--interval", "1ms"), "shorter than 100ms"),
        (("--view", "roms"), "'roms' is not one of"),
    ],
)
def test_wrong_usage_is_one_line(args: tuple[str, ...], why: str, kvctl: Any) -> None:
    outcome = kvctl("top", *args)
    assert outcome.code == 2
    assert why in outcome.err
