"""Faults of stock servers that `kvctl doctor -e URL` names by their metrics alone, and `kvctl logs` by their logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvctl.lab.bench.sglang_servers import Process, wait_ready
from tests.sglang_servers.conftest import Servers, Undivided
from tests.sglang_servers.test_faults import LEFT_BEHIND_S, Load, answered_after
from tests.sglang_servers.test_tokens import prompt

# A reading takes seven seconds, and several may be needed.
NAMED_S = 3 * LEFT_BEHIND_S
WAITING = 4

stock = pytest.mark.modes("nixl", reason="the other modes have agents, which tell more")


def kvctl(servers: Servers, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVCTL_SOCKET_DIR": str(servers.socket_dir)}
    command = [sys.executable, "-m", "kvctl", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def wait_named(servers: Servers, expected: set[tuple[str, str]], *at: Process) -> None:
    """Waits until `kvctl doctor` has named all codes, each with the server that it is about."""
    urls = [option for each in at for option in ("-e", each.url)]
    deadline, seen = time.monotonic() + NAMED_S, set[tuple[str, str]]()
    while not expected <= seen:
        report = kvctl(servers, "doctor", *urls, "-o", "json").stdout
        seen |= {(row["code"], row["subject"]) for row in json.loads(report)["data"]}
        assert time.monotonic() < deadline, f"{expected - seen} not among {seen}; at last {report}"


def place(server: Process) -> str:
    return server.url.removeprefix("http://")


@contextmanager
def stopped_scheduler(server: Process) -> Iterator[None]:
    """Stops the scheduler of a server, which goes on to answer HTTP."""
    listed = subprocess.run(
        ["pgrep", "-g", str(server.pid), "-f", "sglang::scheduler"], capture_output=True, text=True, check=True
    )
    pids = [int(pid) for pid in listed.stdout.split()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@stock
@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_healthy_servers_have_no_problem(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("tp1-tp1")
    tokens = prompt(90, seed=31)
    answered_after(prefill, decode, tokens, undivided.tokens(tokens))
    for options in (("doctor", "-e", prefill.process.url, "-e", decode.url), ("status", "-e", decode.url)):
        report = kvctl(servers, *options)
        assert report.returncode == 0, report.stdout + report.stderr


@stock
@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_a_decode_server_stands_still(servers: Servers, undivided: Undivided) -> None:
    """Its HTTP server is well; requests pile up on both sides."""
    prefill, decode = servers.pair("tp1-tp1")
    tokens = prompt(90, seed=32)
    expected = undivided.tokens(tokens)
    with ThreadPoolExecutor(WAITING) as pool:
        with stopped_scheduler(decode):
            waiting = [pool.submit(prefill.generate, decode, tokens, 16, 2 * NAMED_S) for _ in range(WAITING)]
            stuck = {("KV_QUEUE_STUCK", place(each)) for each in (prefill.process, decode)}
            wait_named(servers, stuck, prefill.process, decode)
        for each in waiting:
            each.exception()  # SGLang may have given some up meanwhile
    answered_after(prefill, decode, tokens, expected)


@stock
@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_a_prefill_server_is_gone(servers: Servers, undivided: Undivided) -> None:
    """Decode counts requests that fail, and finish without a token."""
    prefill, decode = servers.pair("tp1-tp1")
    with Load(prefill, decode, undivided, threads=2) as load:
        load.wait_answers(2)
        prefill.process.kill()
        expected = {
            ("unreachable", place(prefill.process)),
            ("KV_REQUESTS_FAILED", place(decode)),
            ("KV_NO_TOKENS", place(decode)),
        }
        wait_named(servers, expected, prefill.process, decode)
    assert load.errors
    report = kvctl(servers, "logs", str(decode.log), "-o", "json")
    assert report.returncode == 1
    assert {row["engine"] for row in json.loads(report.stdout)["data"]} >= {"sglang"}
    prefill.process.start()
    wait_ready([prefill.process])
    tokens = prompt(90, seed=33)
    answered_after(prefill, decode, tokens, undivided.tokens(tokens))
