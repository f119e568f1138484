"""Files that list endpoints, and the values of `-e` that name them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.discovery import is_url, open_source, split
from kvctl.client.discovery.file_source import MAX_BYTES, parse
from kvctl.client.discovery.source import MAX_AGENTS, AgentSources, Found, SourceError
from kvctl.client.endpoints import discover, endpoint_of
from kvctl.client.keys import NO_KEYS
from kvctl.errors import CliError

S = 1_000_000_000


def find(url: str, timeout_s: float = 60.0) -> Found:
    return open_source(url, NO_KEYS).find(time.monotonic_ns() + round(timeout_s * S))


def addresses(found: Found) -> list[str]:
    return [endpoint.address for endpoint in found.endpoints]


def test_a_list_has_one_endpoint_per_line(tmp_path: Path) -> None:
    path = tmp_path / "with space,and comma"
    path.write_text(
        "# the fleet\ntcp://node-0:7311 # first\n\n/run/kvctl/a.sock\ntcp://[fe80::1%eth0]:1\ntcp://node-0:7311\n"
    )
    found = find(f"file://{path}")
    assert addresses(found) == ["tcp://node-0:7311", "ipc:///run/kvctl/a.sock", "tcp://[fe80::1%eth0]:1"]
    assert found.faults == ()


@pytest.mark.parametrize("line", ["prefill-0", "tcp://node", "tcp://a b:1", "file:///etc/passwd", "tcp://:7"])
def test_a_wrong_line_is_named_and_the_others_count(line: str) -> None:
    found = parse(f"tcp://a:1\n{line}\ntcp://b:1".encode(), "file:///x")
    assert addresses(found) == ["tcp://a:1", "tcp://b:1"]
    (fault,) = found.faults
    assert fault.agent == ""
    assert fault.message.startswith("file:///x: line 2: ")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (MAX_BYTES + 1), "more than 1 MiB"),
        (b"".join(b"tcp://a:%d\ntcp://b:%d\n" % (port, port) for port in range(1, 1 + MAX_AGENTS)), "more than"),
    ],
)
def test_what_is_no_list_is_refused(content: bytes, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        parse(content, "file:///x")


@given(st.binary(max_size=400))
def test_any_bytes_are_a_list_or_refused(content: bytes) -> None:
    try:
        found = parse(content, "file:///x")
    except SourceError:
        return
    assert all(endpoint_of(address).address == address for address in addresses(found))


def test_a_missing_file_and_a_fifo_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "fifo"):
        with pytest.raises(SourceError, match="there is no such file"):
            find(f"file://{tmp_path}/{name}")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a,b c", ["a", "b", "c"]),
        ("tcp://a:1,tcp://b:1", ["tcp://a:1", "tcp://b:1"]),
        ("decode-0 file:///x,y b", ["decode-0", "file:///x,y", "b"]),
        ("", []),
    ],
)
def test_values_of_one_text_are_split(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


@pytest.mark.parametrize("url", ["file://relative", "file://"])
def test_a_malformed_url_is_a_usage_error(url: str) -> None:
    assert is_url(url)
    with pytest.raises(CliError, match="write "):
        open_source(url, NO_KEYS)


def test_sources_and_addresses_are_mixed_without_duplicates(tmp_path: Path, surroundings: None) -> None:
    (tmp_path / "list").write_text("tcp://a:1\ntcp://c:1\nwrong\n")
    sources = AgentSources(NO_KEYS, 60 * S)
    found = discover([f"file://{tmp_path}/list", "tcp://b:1", "tcp://c:1"], sources)
    sources.close()
    assert [endpoint.address for endpoint in found.live] == ["tcp://a:1", "tcp://c:1", "tcp://b:1"]
    (fault,) = found.faults
    assert "line 3: wrong: write tcp://host:port" in fault.message
