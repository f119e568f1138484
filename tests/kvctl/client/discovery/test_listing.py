"""Files and commands that list endpoints, and the values of `-e` that name them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.discovery import is_url, listing, open_source, split
from kvctl.client.discovery.source import MAX_AGENTS, AgentSources, Found, SourceError
from kvctl.client.endpoints import discover, endpoint_of
from kvctl.client.keys import NO_KEYS
from kvctl.errors import CliError
from tests.support.polling import until
from tests.support.process_end import wait_for_end

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


@pytest.mark.parametrize(
    "line", ["prefill-0", "tcp://node", "tcp://a b:1", "exec:reboot", "file:///etc/passwd", "tcp://:7"]
)
def test_a_wrong_line_is_named_and_the_others_count(line: str) -> None:
    found = listing.parse(f"tcp://a:1\n{line}\ntcp://b:1".encode(), "file:///x")
    assert addresses(found) == ["tcp://a:1", "tcp://b:1"]
    (fault,) = found.faults
    assert fault.agent == ""
    assert fault.message.startswith("file:///x: line 2: ")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (listing.MAX_BYTES + 1), "more than 1 MiB"),
        (b"".join(b"tcp://a:%d\ntcp://b:%d\n" % (port, port) for port in range(1, 1 + MAX_AGENTS)), "more than"),
    ],
)
def test_what_is_no_list_is_refused(content: bytes, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        listing.parse(content, "file:///x")


@given(st.binary(max_size=400))
def test_any_bytes_are_a_list_or_refused(content: bytes) -> None:
    try:
        found = listing.parse(content, "file:///x")
    except SourceError:
        return
    assert all(endpoint_of(address).address == address for address in addresses(found))


def test_a_missing_file_and_a_fifo_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "fifo"):
        with pytest.raises(SourceError, match="there is no such file"):
            find(f"file://{tmp_path}/{name}")


def test_a_command_prints_endpoints() -> None:
    assert addresses(find("exec:for i in 1 2; do echo tcp://node-$i:7311; done")) == [
        "tcp://node-1:7311",
        "tcp://node-2:7311",
    ]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("echo some; echo why it failed >&2; exit 3", "failed with exit code 3: why it failed"),
        ("kill -TERM $$", "failed with signal 15"),
        ("/nonexistent/program", "failed with exit code 127"),
        ("yes tcp://a:1", "printed more than 1 MiB"),
    ],
)
def test_a_command_that_fails_says_so(command: str, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        find(f"exec:{command}")


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(SourceError, match="has not ended in time"):
        find(f"exec:sleep 1000 & echo $! > {pid}; trap '' TERM; wait", timeout_s=3.0)
    wait_for_end(int(pid.read_text()))


def test_what_a_command_leaves_in_the_background_delays_nothing_and_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert addresses(find(f"exec:sleep 1000 & echo $! > {pid}; echo tcp://a:1")) == ["tcp://a:1"]
    wait_for_end(int(pid.read_text()))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a,b c", ["a", "b", "c"]),
        ("tcp://a:1,tcp://b:1", ["tcp://a:1", "tcp://b:1"]),
        ("decode-0 file:///x,y exec:echo a, b", ["decode-0", "file:///x,y", "exec:echo a, b"]),
        ("", []),
    ],
)
def test_values_of_one_text_are_split_and_commands_stay_whole(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


@pytest.mark.parametrize("url", ["file://relative", "file://", "exec:", "exec:  "])
def test_a_malformed_url_is_a_usage_error(url: str) -> None:
    assert is_url(url)
    with pytest.raises(CliError, match="write "):
        open_source(url, NO_KEYS)


def test_sources_and_addresses_are_mixed_without_duplicates(tmp_path: Path, surroundings: None) -> None:
    (tmp_path / "list").write_text("tcp://a:1\ntcp://b:1\n")
    sources = AgentSources(NO_KEYS, 60 * S)
    found = discover([f"file://{tmp_path}/list", "tcp://b:1", "exec:echo tcp://c:1; echo wrong"], sources)
    sources.close()
    assert [endpoint.address for endpoint in found.live] == ["tcp://a:1", "tcp://b:1", "tcp://c:1"]
    (fault,) = found.faults
    assert "line 2: wrong: write tcp://host:port" in fault.message


def test_one_slow_source_costs_the_others_nothing(tmp_path: Path, at_best: Any) -> None:
    (tmp_path / "list").write_text("tcp://a:1\n")
    sources = AgentSources(NO_KEYS, 3 * S)
    started = time.monotonic()
    urls = [f"exec:sleep {1000 + number}" for number in range(8)]
    found = sources.find([*urls, f"file://{tmp_path}/list"])
    assert time.monotonic() - started < 60
    sources.close()
    assert addresses(found[f"file://{tmp_path}/list"]) == ["tcp://a:1"]
    assert all(found[url].faults[0].code == "timeout" for url in urls)


def test_no_command_is_left_when_kvctl_ends_before_it(tmp_path: Path) -> None:
    """As on Ctrl-C, which closes the sources while the command runs."""
    pid = tmp_path / "pid"
    sources = AgentSources(NO_KEYS, 600 * S)
    url = f"exec:echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 1000"
    waiting = threading.Thread(target=sources.find, args=([url],))
    waiting.start()
    until(lambda: pid.exists(), "the command was not started")
    sources.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert not Path(f"/proc/{int(pid.read_text())}").exists()
