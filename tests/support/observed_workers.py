"""Workers without an engine, in this process and in others, and the observer that serves them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvctl_agent.contract.settings import load_settings
from kvctl_agent.observer.link import ObserverLink, new_region
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.hub import Telemetry
from tests.support.observers import observer_pid
from tests.support.polling import until

Connect = Callable[..., Any]  # a Client of tests.support.admin_client

WORKER = r"""
import ctypes, os, sys, time
from pathlib import Path
from tests.support.observed_workers import Linked
workers = [Linked(name, Path(sys.argv[1])) for name in sys.argv[2].split(",")]
for worker in workers:
    worker.link.start()
    worker.telemetry.open(7, 1)
    worker.telemetry.flush()
if "fork" in sys.argv and os.fork() == 0:
    time.sleep(60)
os.write(1, b"ready\n")
if "hang" in sys.argv:
    ctypes.PyDLL(None).sleep(600)  # with the interpreter
time.sleep(600)
"""


class Linked:
    """A worker without an engine: telemetry in a region, and the link to its observer."""

    def __init__(
        self,
        name: str,
        directory: Path,
        handlers: dict[str, Any] | None = None,
        tick: Callable[[], None] | None = None,
        **config: Any,
    ) -> None:
        settings = load_settings({"observer": "process", **config})
        self.notes: list[str] = []
        clock = Clock()
        region = new_region(settings, name, "decode", 255, clock, self.notes.append, directory)
        self.telemetry = Telemetry(name, "decode", region, clock)
        self.link = ObserverLink(
            region,
            settings,
            handlers or {},
            flush=partial(self.telemetry.flush, wait=True),
            note=self.notes.append,
            tick=tick,
            directory=directory,
        )

    def close(self) -> None:
        self.link.close()
        self.telemetry.region.close()


@pytest.fixture
def directory(socket_dir: Path) -> Path:
    return socket_dir


@pytest.fixture
def linked(directory: Path) -> Iterator[Callable[..., Linked]]:
    """Starts workers in this process, and closes them after the test."""
    started: list[Linked] = []

    def start(name: str = "decode-0", handlers: dict[str, Any] | None = None, **config: Any) -> Linked:
        worker = Linked(name, directory, handlers, **config)
        started.append(worker)
        worker.link.start()
        return worker

    yield start
    for worker in started:
        worker.close()


@pytest.fixture
def elsewhere(directory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts workers in processes of their own, which are killed at the end."""
    with contextlib.ExitStack() as processes:

        def start(*arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", WORKER, str(directory), *arguments]
            process = processes.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            processes.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        yield start


def at(directory: Path, name: str = "decode-0") -> Path:
    return directory / f"{name}.sock"


def observer(directory: Path) -> int:
    pid = observer_pid(directory)
    assert pid is not None
    return pid


def served(connect: Connect, path: Path) -> dict[str, Any]:
    """Waits until a worker is served, and returns its hello."""
    until(lambda: reachable(path), f"socket {path.name}")
    found: dict[str, Any] = connect(path).ask("hello")["data"]
    return found


def eventfd_value(descriptor: int) -> int:
    with contextlib.suppress(BlockingIOError):
        return os.eventfd_read(descriptor)
    return 0


def reachable(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fspath(path)) == 0
