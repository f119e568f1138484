"""Host names are looked up on other threads: a silent resolver holds nobody, and lookups are bounded."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from kvctl_agent.host import resolver
from kvctl_agent.host.resolver import Answer, find, resolve
from tests.support.names import Names
from tests.support.polling import until

WAIT_S = 60.0


def found(host: str, since_ns: int = 0, recent_ns: int = 0) -> Answer:
    """Returns the answer about a host as soon as there is one."""
    deadline = time.monotonic() + WAIT_S
    while (answer := find(host, since_ns, recent_ns)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return answer


def test_an_address_needs_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert find("10.0.0.1", 0) == Answer(("10.0.0.1",))
    assert resolve("fd00::5") == Answer(("fd00::5",))


def test_a_silent_name_delays_no_other_and_fails_by_its_deadline(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "TIMEOUT_S", 0.05)
    names.silent.add("slow.test")
    names.known["quick.test"] = ["fd00::1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
    assert find("slow.test", 0) is None
    assert found("quick.test") == Answer(("10.0.0.2", "10.0.0.1", "fd00::1"))
    late = "host slow.test: no answer within 0.05 s from the resolver in /etc/resolv.conf"
    assert found("slow.test") == resolve("slow.test") == Answer((), late)
    names.known["slow.test"] = ["10.0.0.3"]
    names.answer_all()
    # The late answer counts.
    until(lambda: not found("slow.test").error, within_s=WAIT_S)


def test_recent_addresses_are_used_again_and_a_recent_failure_is_not(names: Names) -> None:
    assert found("pod.test").error
    names.known["pod.test"] = ["10.0.0.2"]
    for _ in range(2):
        assert found("pod.test", time.monotonic_ns(), 60_000_000_000) == Answer(("10.0.0.2",))
    assert names.asked == ["pod.test"] * 2


def test_a_resolver_that_always_takes_longer_than_the_time_limit_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_lookups", resolver._Lookups())
    monkeypatch.setattr(resolver, "TIMEOUT_S", 0.05)
    answers, lookups = threading.Event(), []

    def look_up(host: str) -> Answer:
        lookups.append(host)
        answers.wait(WAIT_S)
        return Answer(("10.0.0.4",))

    monkeypatch.setattr(resolver, "_look_up", look_up)
    assert found("slow.test").error
    since_ns = time.monotonic_ns()  # as a caller that tries again later
    answers.set()
    deadline = time.monotonic() + WAIT_S
    while (answer := find("slow.test", since_ns)) is None or answer.error:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert lookups == ["slow.test"]


def test_a_lookup_gets_its_thread_when_there_are_threads_again(monkeypatch: pytest.MonkeyPatch, names: Names) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names.known["a.test"] = ["10.0.0.5"]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert find("a.test", 0) is None
    assert found("a.test") == Answer(("10.0.0.5",))


def test_an_answer_is_used_as_long_as_the_caller_likes(names: Names) -> None:
    names.known["pod.test"] = ["10.0.0.1"]
    assert found("pod.test").addresses == ("10.0.0.1",)
    names.known["pod.test"] = ["10.0.0.2"]
    assert found("pod.test").addresses == ("10.0.0.1",)
    assert found("pod.test", time.monotonic_ns()).addresses == ("10.0.0.2",)


@pytest.mark.parametrize("host", ["unknown.test", "x" * 64 + ".test"])
def test_what_is_unknown_is_named(names: Names, host: str) -> None:
    answer = found(host)
    assert not answer.addresses
    assert answer.error.startswith(f"host {host} cannot be looked up: ")


def test_threads_are_bounded(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_MOST_THREADS", 3)
    silent = [f"host{number}.test" for number in range(9)]
    names.silent.update(silent)
    for host in silent:
        assert find(host, 0) is None
        assert find(host, 0) is None
    running = [thread for thread in threading.enumerate() if thread.name == "kvctl-resolver"]
    assert len(running) == 3
    names.answer_all()
    assert all("cannot be looked up" in found(host).error for host in silent)
    assert sorted(names.asked) == sorted(silent)


def test_a_flood_of_names_is_bounded_and_served_in_turn(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_MOST_NAMES", 4)
    hosts = [f"host{number}.test" for number in range(12)]
    names.known.update({host: ["10.0.0.1"] for host in hosts})
    answers: list[Any] = [found(host) for host in hosts]
    assert answers == [Answer(("10.0.0.1",))] * 12
    assert len(resolver._lookups.answers) <= 4
