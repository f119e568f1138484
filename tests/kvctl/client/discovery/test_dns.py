"""DNS names as sources; tests/network/test_discovery.py has a real resolver."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from kvctl.client.discovery import open_source
from kvctl.client.discovery.source import AgentSources, SourceError
from kvctl.client.keys import NO_KEYS
from kvctl.errors import CliError


def answer_with(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def look_up(host: str, port: Any, **_: Any) -> list[Any]:
        return [
            (socket.AF_INET6, 1, 6, "", (each, 0, 0, 0)) if ":" in each else (socket.AF_INET, 1, 6, "", (each, 0))
            for each in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


def addresses(url: str) -> list[str]:
    return [each.address for each in open_source(url, NO_KEYS).find(time.monotonic_ns() + 60 * 10**9).endpoints]


def test_every_address_is_an_agent_at_each_port(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "10.0.0.2", "10.0.0.1", "10.0.0.2")
    assert addresses("dns://kv:7311") == ["tcp://10.0.0.1:7311", "tcp://10.0.0.2:7311"]
    assert addresses("dns://kv:7311+2") == [f"tcp://10.0.0.{host}:{port}" for host in (1, 2) for port in (7311, 7312)]


def test_the_second_address_of_each_agent_is_not_another_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, "fd00::1", "10.0.0.1")
    assert addresses("dns://kv:7311") == ["tcp://10.0.0.1:7311"]
    answer_with(monkeypatch, "fd00::1", "fe80::1%eth0")
    assert addresses("dns://kv:7311") == ["tcp://[fd00::1]:7311", "tcp://[fe80::1%eth0]:7311"]


def test_a_name_of_too_many_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, *(f"10.0.{high}.{low}" for high in range(65) for low in range(256)))
    with pytest.raises(SourceError, match="more than 16384"):
        addresses("dns://kv:7311")


def test_names_of_this_host_are_known() -> None:
    assert addresses("dns://localhost:7311") == ["tcp://127.0.0.1:7311"]


def test_a_resolver_without_a_time_limit_ends_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    sources = AgentSources(NO_KEYS, 2_000_000_000)
    took = []
    for _ in range(6):  # each turn of `kvctl top`
        began = time.monotonic()
        found = sources.find(["dns://kv:7311"])["dns://kv:7311"]
        took.append(time.monotonic() - began)
        assert (found.faults[0].code, "no answer within 2 s" in found.faults[0].message) == ("timeout", True)
    sources.close()
    answered.set()
    assert took[0] >= 2
    assert min(took[1:]) < 1, "the resolver that has not answered delays every turn"


@pytest.mark.parametrize(
    "url",
    [
        *("dns://kv", "dns://:7311", "dns://kv:0", "dns://kv:7311+0", "dns://kv:7311+65", "dns://kv:65535+2"),
        "dns://k v:1",
    ],
)
def test_a_malformed_url_is_a_usage_error(url: str) -> None:
    with pytest.raises(CliError, match="write dns://"):
        open_source(url, NO_KEYS)
