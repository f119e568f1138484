"""`kvctl check --http`: what probes and load balancers get."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from kvctl.commands import check_server
from kvctl.commands.check_server import CheckResult, SharedChecks
from kvctl.exit_codes import CheckState


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """Runs `kvctl check` until the end of the block; yields its URL."""
    command = [sys.executable, "-m", "kvctl", "check", *options, "--http", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "http://127.0.0.1:" in line, line + process.stderr.read()
        yield line.split(": ")[2].split("/ and ")[0]
    finally:
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def get(url: str, accept: str = "*/*") -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_a_healthy_fleet_answers_200(fleet: Any) -> None:
    with serving("ready") as url:
        status, kind, text = get(url)
        assert (status, kind) == (200, "text/plain; charset=utf-8")
        assert text.startswith("KVCTL READY OK - agents 4")
        for document in (get(f"{url}/json"), get(url, "application/json")):
            assert document[:2] == (200, "application/json")
            (row,) = json.loads(document[2])["data"]
            assert (row["check"], row["state"]) == ("ready", "ok")
        assert get(f"{url}/metrics")[0] == 404


def test_a_threshold_that_is_exceeded_answers_503(fleet: Any) -> None:
    with serving("ready", "--crit", "agents=9") as url:
        status, _, text = get(url)
        assert status == 503
        assert text.startswith("KVCTL READY CRITICAL - ")
        (row,) = json.loads(get(f"{url}/json")[2])["data"]
        assert row["state"] == "critical"


def test_without_agents_the_answer_is_503() -> None:
    with serving() as url:
        status, _, text = get(url)
        assert status == 503
        assert "no agent found" in text


def checks(state: CheckState, entered: Callable[[], None] = lambda: None) -> tuple[SharedChecks, list[int]]:
    calls: list[int] = []

    def check() -> CheckResult:
        calls.append(1)
        entered()
        return CheckResult(state, "text", "json")

    return SharedChecks(check), calls


@pytest.mark.parametrize(
    ("state", "status"),
    [(CheckState.OK, 200), (CheckState.WARNING, 200), (CheckState.CRITICAL, 503), (CheckState.UNKNOWN, 503)],
)
def test_a_warning_takes_nothing_out_of_service(state: CheckState, status: int) -> None:
    answer = checks(state)[0].pages()["/"]("")()
    assert (answer.status, answer.body) == (HTTPStatus(status), b"text")


def test_a_result_is_kept_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(check_server.time, "monotonic", lambda: now[0])
    shared, calls = checks(CheckState.OK)
    for at, expected in ((100.0, 1), (100.9, 1), (101.1, 2)):
        now[0] = at
        shared.result()
        assert len(calls) == expected


def test_clients_that_come_together_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_server, "_KEPT_S", 600.0)  # a busy host may start a thread a second late
    goes_on = threading.Event()
    shared, calls = checks(CheckState.OK, lambda: goes_on.wait(60) and None)
    clients = [threading.Thread(target=shared.result) for _ in range(8)]
    for client in clients:
        client.start()
    goes_on.set()
    for client in clients:
        client.join()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--http", "0.0.0.0:9500"], "other machines can reach this address"),
        (["--http", "9500"], "write address:port"),
        (["--http", "127.0.0.1:0", "-o", "json"], "omit --output"),
        (["--http", "127.0.0.1:0", "-w"], "omit --output and --watch"),
    ],
)
def test_wrong_usage_is_unknown(kvctl: Any, options: list[str], text: str) -> None:
    outcome = kvctl("check", "all", *options)
    assert outcome.code == 3
    assert text in outcome.out


def test_a_port_that_is_taken(kvctl: Any) -> None:
    with serving() as url:
        outcome = kvctl("check", "--http", url.removeprefix("http://"))
        assert outcome.code == 3
        assert "Address already in use" in outcome.out
