"""Servers killed under load, and clients that leave: the others answer on, with the right tokens."""

from __future__ import annotations

import json
import random
import threading
import time
from functools import partial
from http.client import HTTPConnection

import pytest

from kvctl.lab.bench.sglang_servers import HOST, Process, ServerError, Tokens, together, wait_ready
from tests.sglang_servers.conftest import Servers, Undivided
from tests.sglang_servers.test_kvctl import kvctl
from tests.sglang_servers.test_tokens import prompt
from tests.support.sglang_fleet import Prefill, request

# Requests that a dead server leaves behind end within this time, with an error.
LEFT_BEHIND_S = 90.0
# A client gives up after this time: SGLang keeps a request whose other half was lost for minutes.
LOAD_REQUEST_S = 30.0


class Load:
    """Threads that send requests to a pair until told to stop; each answer has the right tokens or is an error."""

    def __init__(self, prefill: Prefill, decode: Process, undivided: Undivided, threads: int = 6) -> None:
        self._pair = prefill, decode
        self._prompts = [prompt(length, seed=20) for length in (40, 120, 250)]
        self._expected = [undivided.tokens(each, 64) for each in self._prompts]
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]
        self.answers = 0
        self.errors: list[str] = []
        self.wrong: list[Tokens] = []

    def _run(self, number: int) -> None:
        prefill, decode = self._pair
        while not self._stop.is_set():
            number = (number + 1) % len(self._prompts)
            try:
                _first, answer = prefill.generate(decode, self._prompts[number], 64, LOAD_REQUEST_S)
            except ServerError as error:
                self.errors.append(str(error)[:120])
                self._stop.wait(0.5)
            else:
                self.answers += 1
                if answer.tokens != self._expected[number]:
                    self.wrong.append(answer.tokens)

    def wait_answers(self, count: int) -> None:
        deadline = time.monotonic() + LEFT_BEHIND_S
        while self.answers < count:
            assert time.monotonic() < deadline, f"{self.answers} answers, errors {self.errors[-3:]}"
            time.sleep(0.05)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def answered_after(prefill: Prefill, decode: Process, tokens: Tokens, expected: Tokens) -> float:
    """Repeats a request until both servers answer it; returns the seconds until then.

    A short time limit per try: a request that meets a dead peer must not hide that the next one is answered.
    """
    begin = time.monotonic()
    while True:
        try:
            _first, answer = prefill.generate(decode, tokens, len(expected), timeout_s=10)
        except ServerError as error:
            if time.monotonic() - begin > LEFT_BEHIND_S:
                raise AssertionError(f"not answered for {LEFT_BEHIND_S:g} s: {error}") from None
            time.sleep(0.1)
        else:
            assert answer.tokens == expected
            return time.monotonic() - begin


def idle(server: Process) -> None:
    """Waits until a server has no request in any queue; it flushes its cache only then."""
    try:
        request(f"{server.url}/flush_cache?timeout={LEFT_BEHIND_S}", b"")
    except ServerError as error:
        raise AssertionError(f"{error}\n{server.log_end()}") from None


def wait_named_first(servers: Servers, agent: str) -> None:
    """Waits until the first finding of `kvctl doctor` is about an agent; SGLang learns of a death by a timeout."""
    deadline = time.monotonic() + LEFT_BEHIND_S
    while True:
        report = kvctl(servers, "doctor").stdout
        if any(line.startswith("1. ") and agent in line for line in report.splitlines()):
            return
        assert time.monotonic() < deadline, report
        time.sleep(0.5)


def leave(at: Process, document: bytes, after_s: float) -> None:
    """Sends a request and closes the connection some time later, whatever has come by then."""
    connection = HTTPConnection(HOST, at.port)
    try:
        connection.request("POST", "/generate", document, {"Content-Type": "application/json"})
        time.sleep(after_s)
    finally:
        connection.close()


@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_prefill_is_killed_under_load(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("tp1-tp1")
    other, _ = servers.pair("tp2-tp1")
    tokens = prompt(90, seed=21)
    expected = undivided.tokens(tokens)
    with Load(prefill, decode, undivided) as load:
        load.wait_answers(10)
        killed = time.monotonic()
        prefill.process.kill()
        other_s = answered_after(other, decode, tokens, expected)
    print(f"{servers.mode}: requests left behind ended after {time.monotonic() - killed:.1f} s: {set(load.errors)}")
    assert not load.wrong
    assert load.errors
    if servers.mode != "nixl":
        wait_named_first(servers, f"prefill-tp0@{HOST}:{prefill.process.port}")
    prefill.process.start()
    wait_ready([prefill.process])
    again_s = answered_after(prefill, decode, tokens, expected)
    print(f"{servers.mode}: prefill killed: another one after {other_s:.1f} s, itself {again_s:.1f} s after its start")
    idle(decode)


@pytest.mark.parametrize("servers", ["tp1-tp2+dp2"], indirect=True, scope="session")
def test_decode_is_killed_under_load(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("tp1-tp2")
    _, other = servers.pair("tp1-dp2")
    tokens = prompt(90, seed=22)
    expected = undivided.tokens(tokens)
    with Load(prefill, decode, undivided) as load:
        load.wait_answers(10)
        killed = time.monotonic()
        decode.kill()
        other_s = answered_after(prefill, other, tokens, expected)
    print(f"{servers.mode}: requests left behind ended after {time.monotonic() - killed:.1f} s: {set(load.errors)}")
    assert not load.wrong
    assert load.errors
    if servers.mode != "nixl":
        wait_named_first(servers, f"decode-tp0@{HOST}:{decode.port}")
    decode.start()
    wait_ready([decode])
    again_s = answered_after(prefill, decode, tokens, expected)
    print(f"{servers.mode}: decode killed: another one after {other_s:.1f} s, itself {again_s:.1f} s after its start")
    idle(prefill.process)


@pytest.mark.parametrize("servers", ["tp1+tp2-tp1"], indirect=True, scope="session")
def test_clients_leave(servers: Servers, undivided: Undivided) -> None:
    prefill, decode = servers.pair("tp2-tp1")
    chance = random.Random(23)
    with Load(prefill, decode, undivided, threads=2) as load:
        for _wave in range(5):
            calls = []
            for number in range(12):
                document = json.dumps({**prefill.request(prompt(300, seed=number), 256), "stream": True}).encode()
                calls += [partial(leave, at, document, chance.uniform(0, 1)) for at in (prefill.process, decode)]
            together(calls)
        load.wait_answers(load.answers + 4)
    assert not load.wrong
    for server in (prefill.process, decode):
        idle(server)
    tokens = prompt(250, seed=24)
    _first, answer = prefill.generate(decode, tokens)
    assert answer.tokens == undivided.tokens(tokens)
