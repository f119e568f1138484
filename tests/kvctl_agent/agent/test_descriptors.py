"""Workers whose process runs out of file descriptors: nobody who connects ends them, and rooms go on."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Prefill and decode in one process: reads a command a line, answers each with a line. `{limit}`: of descriptors.
WORKER = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import numpy as np
from kvctl_agent import Agent, KVPool, Rank

def agent(role):
    keys, values = ([np.zeros((64 * 16, 2, 32), np.float16) for _ in range(2)] for _ in "kv")
    pool = KVPool.from_tensors(keys, values, page_size=16, total_kv_heads=2)
    config = dict(transport="loopback", staging_buffer_mb=1, staging_ring_mb=4)
    return Agent(role=role, rank=Rank(), pool=pool, name=role, bootstrap=f"ipc://{sys.argv[1]}/boot", **config)

prefill, decode = agent("prefill").start(), agent("decode").start()
decode.wait_ready(60)
number, hogged = 0, []
print("ready", flush=True)
for line in sys.stdin:
    if line == "hog\\n":
        soft = len(os.listdir("/proc/self/fd")) + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                hogged.append(os.open("/dev/null", 0))
        except OSError:
            pass
        print("hogged", flush=True)
    else:
        number += 1
        receive, send = decode.receive(number, [number % 64]), prefill.send(number)
        send.pages([1], last=True)
        send.finish()
        print(receive.wait(60).name, *(receive.error or {}).values(), flush=True)
for descriptor in hogged:
    os.close(descriptor)
prefill.close()
decode.close()
"""


class Worker:
    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(directory), str(limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self.line()

    def status(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvctl", "--timeout", "60s", "status", "-o", "json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


@pytest.fixture
def start(socket_dir: Path) -> Iterator[Callable[[int], Worker]]:
    workers: list[Worker] = []

    def worker(limit: int) -> Worker:
        workers.append(Worker(socket_dir, limit))
        return workers[-1]

    yield worker
    for each in workers:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
        with each.process:
            pass


def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    deadline = time.monotonic() + 60
    while (code := client.connect_ex(str(path))) == errno.EAGAIN:
        assert time.monotonic() < deadline, f"the backlog of {path} stays full"
        time.sleep(0.005)
    assert code == 0
    return client


def test_status_of_a_process_without_free_descriptors_is_answered(start: Callable[[int], Worker]) -> None:
    worker = start(1024)
    assert worker.line() == "ready"
    assert worker.ask("room") == "SUCCESS"
    assert worker.ask("hog") == "hogged"
    for _ in range(3):
        found = worker.status()
        assert (found.returncode, found.stderr) == (0, "")
        assert worker.ask("room") == "SUCCESS"
    assert worker.close() == 0


def test_a_thousand_connections_to_any_socket_of_ours_stop_nothing(
    start: Callable[[int], Worker], socket_dir: Path
) -> None:
    worker = start(256)
    assert worker.line() == "ready"
    sockets = [path for path in socket_dir.iterdir() if path.is_socket()]
    assert {"prefill.sock", "decode.sock", "boot"} < {path.name for path in sockets}  # and prefill's control socket
    for path in sorted(sockets):
        clients = [connected(path) for _ in range(1020)]
        assert worker.ask("room") == "SUCCESS"
        assert worker.status().returncode == 0
        for client in clients:
            client.close()
    assert worker.ask("room") == "SUCCESS"
    assert worker.close() == 0


def test_too_few_descriptors_to_start_are_an_error_that_counts_them(start: Callable[[int], Worker]) -> None:
    worker = start(40)
    _, said = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 1
    assert "ConfigError: this process cannot hold an agent: 64 more file descriptors are needed" in said
    assert "the limit is 40 (ulimit -n)" in said
