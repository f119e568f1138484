"""Fixtures of every test: a private socket directory, and a check that the test leaves nothing behind.

Threads, child processes, file descriptors (including engine agents, ZMQ sockets and contexts, and shared memory), admin
socket files and regions that a test creates must be gone when it ends; otherwise the test fails. Agents are observed by
a thread of their own, unless a test sets KVCTL_OBSERVER=process; an observer process is ended after its test.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import active_children, resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import zmq

from kvctl_agent.contract.admin import SOCKET_SUFFIX, region_directory
from kvctl_agent.gil import no_core_ns
from kvctl_agent.host import resolver
from kvctl_agent.observer.process import is_locked
from kvctl_agent.telemetry.region import SUFFIX
from tests.support.names import Names
from tests.support.observers import end_observer

# Minutes of real engines: `make test-sglang`, `make test-vllm` and `make test-sglang-vllm` run them.
collect_ignore = ["sglang_servers", "sglang_to_vllm", "vllm_engines", "wheels"]

os.environ.setdefault("KVCTL_OBSERVER", "thread")

# Nothing in a test may reach for a model hub, whatever the machine allows.
os.environ["HF_HUB_OFFLINE"] = "1"

# A run that was started in the background has this signal ignored, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup: a handler keeps it from what tests start only
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# How long an example takes says something of the machine only.
hypothesis.settings.register_profile("dev", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("dev"), derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Threads end, and children are reaped, a moment after the call that stops them returns; a busy machine makes it long.
LEAK_GRACE_S = 20.0
ZMQ_TERM_S = 20.0
TRIES = 20


@dataclass(frozen=True)
class Held:
    """Resources of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: frozenset[tuple[int, str]]

    @classmethod
    def now(cls) -> Held:
        return cls(frozenset(threading.enumerate()), frozenset(_children()), frozenset(_descriptors()))

    def gained(self, later: Held) -> list[str]:
        """Returns one line for each resource in `later` that is not in this one."""
        lines = [f"thread {thread.name}" for thread in later.threads - self.threads]
        lines += [f"child process {pid}: {_command(pid)}" for pid in later.children - self.children]
        lines += [
            f"file descriptor {fd}: {_described(fd, target)}" for fd, target in later.descriptors - self.descriptors
        ]
        return sorted(lines)


# Tests that start fleets of processes or walk all histories. They are marked `full`, which `make test` leaves to
# `make test-all`, except for a sample, which is marked in their files.
FULL = (
    "matrix",
    "scenarios",
    "leaks",
    "explore",
    "fleet",
    "recovery",
    "network",
    "kvctl/commands/test_bench.py",
    "kvctl_agent/integrations/sglang/test_layouts.py",
    "kvctl_agent/integrations/sglang/test_failures.py",
    "kvctl_agent/integrations/sglang/observe/test_observed_pair.py",
)
# These and long files begin first, or one worker would end long after the others. Those of transport/test_peer_loss.py
# mostly wait.
LONGEST = (
    *FULL,
    "kvctl_agent/transport/test_peer_loss.py",
    "kvctl/test_image.py",
    "kvctl/test_krew.py",
    "kvctl/commands/test_json_documents.py",
    "kvctl/commands/test_record_real.py",
    "kvctl/commands/test_newcomer.py",
    "kvctl_agent/agent/test_layout_pairs.py",
    "kvctl_agent/agent/test_layouts.py",
    "kvctl_agent/integrations/sglang",
)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that are not part of `make test`; orders the tests so that the longest files run first."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(here)
        return next((number for number, each in enumerate(LONGEST) if path.is_relative_to(each)), len(LONGEST))

    places = {path: place(item) for path, item in {item.path: item for item in items}.items()}
    for item in items:
        if places[item.path] < len(FULL) and item.get_closest_marker("sample") is None:
            item.add_marker("full")
    items.sort(key=lambda item: places[item.path])


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a thread, a child process or a file descriptor behind."""
    no_core_ns()  # a thread that calls it keeps a file open, and so does the tests' own from here on
    before = Held.now()
    yield
    left = before.gained(Held.now())
    deadline = time.monotonic() + LEAK_GRACE_S
    while left and time.monotonic() < deadline:
        gc.collect()
        active_children()  # reaps those that have ended
        time.sleep(0.01)
        left = before.gained(Held.now())
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def socket_dir(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private directory for admin sockets, short enough for sun_path, set as KVCTL_SOCKET_DIR."""
    directory = Path(tempfile.mkdtemp(prefix="kv-", dir="/tmp"))
    monkeypatch.setenv("KVCTL_SOCKET_DIR", str(directory))
    yield directory
    end_observer(directory)
    regions = region_directory(directory)
    left = [path for path in directory.iterdir() if path.suffix == SOCKET_SUFFIX]
    left += filter(is_locked, regions.glob(f"*{SUFFIX}"))  # others are of processes that the test has killed
    shutil.rmtree(directory)
    shutil.rmtree(regions, ignore_errors=True)
    if left:
        pytest.fail(f"the test left behind: {', '.join(sorted(path.name for path in left))}", pytrace=False)


@pytest.fixture
def at_best() -> Callable[[Callable[[], float], float], None]:
    """Repeat a measurement until its result is below a bound.

    Other work on the machine does not increase every measured time or share of a core; a bug does.
    """

    def measure(once: Callable[[], float], below: float) -> None:
        found: list[float] = []
        while not found or found[-1] >= below:
            assert len(found) < TRIES, f"never below {below:g}: {', '.join(f'{each:.3g}' for each in found)}"
            found.append(once())

    return measure


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """The host names that exist for this process, and which the resolver does not answer."""
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    monkeypatch.setattr(resolver, "_lookups", resolver._Lookups())
    yield names
    names.answer_all()
    for thread in threading.enumerate():
        if thread.name == "kvctl-resolver":
            thread.join(60)


@pytest.fixture
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A ZMQ context for one test; the test fails if a socket of it is still open at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    terminator = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    terminator.start()
    terminator.join(ZMQ_TERM_S)
    if terminator.is_alive():
        for socket in list(context._sockets):
            socket.close(linger=0)
        terminator.join(ZMQ_TERM_S)
        pytest.fail(f"a ZMQ socket was still open or unsent {ZMQ_TERM_S} s after the test ended", pytrace=False)


def _children() -> set[int]:
    """Child processes of every thread, including zombies."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(map(int, (task / "children").read_text().split()))
        except FileNotFoundError:  # the thread ended meanwhile
            continue
    return pids - {_tracker()._pid}


def _descriptors() -> set[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - Path objects would double the cost for each test
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))  # noqa: PTH115
        except FileNotFoundError:  # the directory's own descriptor
            continue
    return {(fd, target) for fd, target in found if fd != _tracker()._fd}


def _described(fd: int, target: str) -> str:
    """The descriptor's target, with the addresses of both ends if it is a socket."""
    if not target.startswith("socket:"):
        return target
    try:
        duplicate = os.dup(fd)
    except OSError:  # closed in the meantime
        return target
    with socket.socket(fileno=duplicate) as copy:
        try:
            peer = copy.getpeername()
        except OSError as error:
            peer = error
        return f"{target} {copy.family.name} {copy.type.name} from {copy.getsockname()} to {peer}"


def _tracker() -> Any:
    """Process id of multiprocessing's resource tracker, which runs from the first spawn until the session ends."""
    return resource_tracker._resource_tracker


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or "ended"
        )
    except FileNotFoundError:
        return "ended"
