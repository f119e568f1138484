"""Looks up host names on threads of its own, because a resolver that does not answer holds its caller for 10 to 40 s.

libzmq looks names up on its only I/O thread, which then serves no other connection. So sockets connect to numeric
addresses only, and the threads that must not wait ask `find` again until it has an answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from typing import NamedTuple

from kvctl_agent.contract.addresses import ip_address

TIMEOUT_S = 5.0
"""Time after which a lookup counts as failed; its thread ends when the system's resolver gives up."""

_MOST_THREADS = 32  # names whose resolver is silent; further ones wait
_MOST_NAMES = 4096
_POLL_S = 0.005


class Answer(NamedTuple):
    """Numeric addresses of a host, those of IPv4 first; without any, `error` says why and names the host."""

    addresses: tuple[str, ...]
    error: str = ""


class _Lookups:
    """The lookups of this process; `answers` have the monotonic time at which they came."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: dict[str, tuple[int, Answer]] = {}
        self.begun_ns: dict[str, int] = {}  # of lookups without an answer
        self.queue: deque[str] = deque()
        self.threads = 0

    def begin(self, host: str, now_ns: int) -> None:
        """Queues a lookup unless it was begun, and starts a thread if there may be one; the caller holds the lock."""
        if host not in self.begun_ns and len(self.begun_ns) < _MOST_NAMES:
            self.begun_ns[host] = now_ns
            self.queue.append(host)
        if self.queue and self.threads < _MOST_THREADS:
            with contextlib.suppress(RuntimeError):  # the process may have no more threads; the next call tries again
                threading.Thread(target=self._run, name="kvctl-resolver", daemon=True).start()
                self.threads += 1

    def _run(self) -> None:
        while True:
            with self.lock:
                if not self.queue:
                    self.threads -= 1
                    return
                host = self.queue.popleft()
            answer = _look_up(host)
            with self.lock:
                while len(self.answers) >= _MOST_NAMES:
                    del self.answers[next(iter(self.answers))]
                self.answers.pop(host, None)
                del self.begun_ns[host]
                # When it came: otherwise no answer of a resolver that needs more than `TIMEOUT_S` would be new enough.
                self.answers[host] = time.monotonic_ns(), answer


_lookups = _Lookups()


def _begin_anew() -> None:
    global _lookups
    _lookups = _Lookups()  # a forked child has none of the threads


os.register_at_fork(after_in_child=_begin_anew)


def find(host: str, since_ns: int, recent_ns: int = 0) -> Answer | None:
    """Returns the addresses of a host, of a lookup that has ended after a monotonic time; never waits.

    Returns None while the lookup is in progress; the call begins it. After `TIMEOUT_S` the answer is an error.

    Args:
        host: host name or IP address, the latter without brackets.
        recent_ns: addresses, but no failure, may be of a lookup that had ended so long before.
    """
    if (address := ip_address(host)) is not None:
        return Answer((str(address),))
    now_ns = time.monotonic_ns()
    with _lookups.lock:
        at_ns, answer = _lookups.answers.get(host, (since_ns - 1, None))
        if answer is not None and at_ns >= since_ns - (recent_ns if answer.addresses else 0):
            return answer
        _lookups.begin(host, now_ns)
        begun_ns = _lookups.begun_ns.get(host, now_ns)
    if now_ns - begun_ns < TIMEOUT_S * 1e9:
        return None
    return _late(host)


def resolve(host: str) -> Answer:
    """Returns the addresses of a host; waits for at most `TIMEOUT_S`. For threads that may wait, such as at start."""
    since_ns = time.monotonic_ns()
    while (answer := find(host, since_ns)) is None:
        if time.monotonic_ns() - since_ns > TIMEOUT_S * 1e9:
            return _late(host)
        time.sleep(_POLL_S)
    return answer


def _late(host: str) -> Answer:
    return Answer((), f"host {host}: no answer within {TIMEOUT_S:g} s from the resolver in /etc/resolv.conf")


def _look_up(host: str) -> Answer:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
        return Answer((), f"host {host} cannot be looked up: {error}")
    rows.sort(key=lambda row: row[0] != socket.AF_INET)  # stable: the resolver's order within a family
    return Answer(tuple(dict.fromkeys(str(row[4][0]) for row in rows)))
