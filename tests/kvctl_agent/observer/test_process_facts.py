"""Facts of processes that run, are stopped, have ended, or are not to be seen."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvctl_agent.observer import process_facts as facts
from kvctl_agent.observer.process_facts import ProcessFacts, end_status, open_process, process_facts, why_ended
from kvctl_agent.telemetry.region import START_FIELD, Header, stat_fields
from tests.support.polling import until

HEADER = Header.of_this_process("decode", "decode-0")
UNKNOWN = ProcessFacts()


class Process:
    """A Python process that reads its input until that ends."""

    def __init__(self, code: str = "import sys; sys.stdin.read()") -> None:
        self.process = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE)
        started = int(stat_fields(self.process.pid)[START_FIELD])
        self.header = HEADER._replace(pid=self.process.pid, started=started)

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Process]:
    child = Process()
    yield child
    child.process.kill()
    child.end()


def test_this_process() -> None:
    found = process_facts(HEADER)
    assert found.state in ("running", "sleeping")  # of the main thread, which runs the test, or waits for a worker
    assert (found.threads or 0) >= 1
    assert (found.rss_bytes or 0) > 1 << 20
    before_ns = found.cpu_ns
    assert before_ns is not None
    until(lambda: (process_facts(HEADER).cpu_ns or 0) > before_ns)


def test_a_process_that_waits_and_one_that_is_stopped(child: Process) -> None:
    until(lambda: process_facts(child.header).state == "sleeping")
    child.process.send_signal(signal.SIGSTOP)
    until(lambda: process_facts(child.header).state == "stopped")
    assert process_facts(child.header, thread=child.process.pid).state == "stopped"
    child.process.send_signal(signal.SIGCONT)
    until(lambda: process_facts(child.header).state == "sleeping")


def test_the_state_of_the_thread_that_was_asked_for() -> None:
    ended = threading.Event()
    waiting = threading.Thread(target=ended.wait)
    waiting.start()
    assert waiting.native_id is not None
    until(lambda: process_facts(HEADER, waiting.native_id or 0).state == "sleeping")
    ended.set()
    waiting.join()


@pytest.mark.parametrize(
    ("number", "text"),
    [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGTERM, "killed by SIGTERM"), (0, "exited with 0")],
)
def test_how_a_process_has_ended(child: Process, number: int, text: str) -> None:
    descriptor = open_process(child.header)
    assert descriptor is not None
    assert select.select([descriptor], [], [], 0)[0] == []
    assert end_status(descriptor, child.header) is None
    if number:
        child.process.send_signal(number)
    else:
        assert child.process.stdin is not None
        child.process.stdin.close()
    assert select.select([descriptor], [], [], 60)[0] == [descriptor]
    until(lambda: process_facts(child.header).state == "zombie")
    status = end_status(descriptor, child.header)
    assert status is not None
    assert why_ended(status) == text
    child.process.wait()
    assert process_facts(child.header) == ProcessFacts("gone")
    assert end_status(descriptor, child.header) in (status, None)  # kernels before 6.15 do not know it any more
    assert open_process(child.header) is None
    os.close(descriptor)


def test_another_process_has_the_number(child: Process) -> None:
    former = child.header._replace(started=child.header.started - 1)
    assert process_facts(former) == ProcessFacts("gone")
    assert open_process(former) is None


@pytest.mark.parametrize("namespace", [0, HEADER.pid_namespace + 1])
def test_a_number_of_another_namespace_tells_nothing(child: Process, namespace: int) -> None:
    apart = child.header._replace(pid_namespace=namespace)
    assert process_facts(apart._replace(started=1)) == UNKNOWN
    assert process_facts(apart._replace(pid=2**30)) == UNKNOWN
    assert open_process(apart._replace(started=1)) is None
    # The same number and start in both: it is the process, as a container's is seen from its host.
    assert process_facts(apart).state is not None


@pytest.mark.parametrize("pid", [0, -1])
def test_no_number(pid: int) -> None:
    assert process_facts(HEADER._replace(pid=pid)) == UNKNOWN


def test_a_start_that_is_unknown(child: Process) -> None:
    unknown = child.header._replace(started=0)
    assert process_facts(unknown) == UNKNOWN
    child.process.kill()
    child.process.wait()
    assert process_facts(unknown) == ProcessFacts("gone")


def test_a_hidden_proc(child: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "stat_fields", lambda process: [])
    assert process_facts(child.header) == UNKNOWN
    child.process.kill()
    child.process.wait()
    assert process_facts(child.header) == ProcessFacts("gone")
