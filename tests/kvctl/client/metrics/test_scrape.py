"""Metrics over HTTP: recorded texts of real engines, and servers that answer something else, slowly or for ever."""

from __future__ import annotations

import gzip
import re
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.faults import FaultCode
from kvctl.client.metrics import scrape as module
from kvctl.client.metrics.scrape import ScrapeError, parse, scrape
from tests.support.exporter import RECORDED, recorded
from tests.support.http_answers import serving
from tests.support.names import Names

S = 1_000_000_000
FAR = 60 * S


def soon(ns: int = FAR) -> int:
    return time.monotonic_ns() + ns


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.txt")))
def test_recorded_texts(name: str) -> None:
    rows = {row["name"]: row for row in parse(recorded(name).encode())}
    prefix = {"sglang": "sglang:", "vllm": "vllm:", "nixl": "agent_"}[name.partition("-")[0]]
    assert {row["kind"] for row in rows.values()} <= {"counter", "gauge", "histogram"}
    assert all(each.startswith(prefix) or each == "process_start_time_seconds" for each in rows)
    for row in rows.values():
        for sample in row["samples"]:
            counts = [count for _, count in sample.get("buckets", ())]
            assert counts == sorted(counts)
            assert not counts or counts[-1] == sample["count"]


def test_chunked_answers() -> None:
    text = recorded("nixl").encode()
    pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"]
    pieces += [b"%x\r\n%s\r\n" % (len(part), part) for part in (text[:1000], text[1000:])]
    with serving([*pieces, b"0\r\n\r\n"]) as place:
        assert scrape(f"http://{place}/metrics", soon()) == parse(text)


@pytest.mark.parametrize(
    ("reply", "code", "text"),
    [
        (answer(b"", "404 Not Found"), FaultCode.PROTOCOL, "--enable-metrics"),
        (answer(b"", "401 Unauthorized"), FaultCode.NOT_PERMITTED, "refuses /metrics"),
        (answer(b"", "500 Oops"), FaultCode.PROTOCOL, "status 500"),
        (answer(b"", "302 Found", "Location: http://elsewhere.invalid/metrics"), FaultCode.PROTOCOL, "elsewhere"),
        (answer(b"", "307 Again", "Location: /metrics"), FaultCode.PROTOCOL, "not followed"),
        (answer(b"", "302 Found", "Location: file:///etc/passwd"), FaultCode.PROTOCOL, "not followed"),
        (answer(b"", "302 Found", "Location: http://["), FaultCode.PROTOCOL, "not followed"),
        (answer(b"", "302 Found", "Location: /metrics HTTP/1.1"), FaultCode.PROTOCOL, "not followed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\nshort", FaultCode.PROTOCOL, "not HTTP"),
        (answer(b"go_goroutines 7\n"), FaultCode.PROTOCOL, "no metrics of an engine"),
        (answer(b"process_start_time_seconds 7\n"), FaultCode.PROTOCOL, "no metrics of an engine"),
        (answer(b"<html>{}</html>"), FaultCode.PROTOCOL, "text format"),
        (answer(gzip.compress(b"sglang:x 1\n", mtime=0)), FaultCode.PROTOCOL, "text format"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", FaultCode.PROTOCOL, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", FaultCode.PROTOCOL, "not HTTP"),
    ],
)
def test_other_answers(reply: bytes, code: FaultCode, text: str) -> None:
    with serving(reply) as place, pytest.raises(ScrapeError, match=text) as caught:
        scrape(f"http://{place}/metrics", soon())
    assert caught.value.code is code


def test_a_redirect_is_named_without_its_query() -> None:
    with (
        serving([answer(b"", "307 Again", "Location: /metrics/?token=secret")]) as place,
        pytest.raises(ScrapeError, match="redirects to '/metrics/', which is not followed"),
    ):
        scrape(f"http://{place}/metrics", soon())


def test_a_host_that_cannot_be_looked_up_is_the_whole_message(names: Names) -> None:
    with pytest.raises(ScrapeError) as caught:
        scrape("http://unknown.test:80/metrics", soon())
    assert caught.value.code is FaultCode.UNREACHABLE
    assert re.fullmatch(r"host unknown\.test cannot be looked up: [^;?]+", str(caught.value))


def test_a_silent_server_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ScrapeError) as caught:
        scrape(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics", soon(S // 5))
    assert caught.value.code is FaultCode.TIMEOUT


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    with (
        serving([b"HTTP/1.1 200 OK\r\n\r\n"] + [b"sglang:x 1\n" * 1000] * 10_000) as place,
        pytest.raises(ScrapeError, match="more than 1 MiB"),
    ):
        scrape(f"http://{place}/metrics", soon())


def test_lines_of_others_are_not_parsed() -> None:
    """A line of four megabytes with many labels takes the parser minutes."""
    labels = ",".join(f'a{number}="b"' for number in range(200_000))
    rows = parse(f"others{{{labels}}} 1\nvllm:num_preemptions_total 2\n".encode())
    assert [row["name"] for row in rows] == ["vllm:num_preemptions_total"]
    with pytest.raises(ScrapeError, match="Ki characters"):
        parse(f"vllm:x{{{labels}}} 1\n".encode())
    with pytest.raises(ScrapeError, match="50000 lines"):
        parse(b"vllm:x 1\n" * 50_001)


def test_parsing_ends_at_the_deadline() -> None:
    with pytest.raises(ScrapeError, match="within the time limit"):
        parse(b"vllm:x 1\n" * 50_000, soon(-1))


@pytest.mark.parametrize("chunked", [False, True])
def test_a_connection_that_stays_open_after_the_answer(chunked: bool) -> None:
    text = recorded("nixl").encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)] if chunked else [whole]
    with serving([*pieces, b""], pause_s=3600) as place:
        assert scrape(f"http://{place}/metrics", soon()) == parse(text)


@given(
    st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=30),
    st.sampled_from(["Location", "Content-Length", "Transfer-Encoding", "Content-Type"]),
    st.sampled_from(["200 OK", "302 Found", "204 No Content", "100 Continue"]),
)
def test_any_header_is_an_answer_or_an_error(value: str, name: str, status: str) -> None:
    reply = f"HTTP/1.1 {status}\r\n{name}: {value}\r\n\r\nvllm:num_preemptions_total 2\n".encode("latin-1")
    near, far = socket.socketpair()
    far.sendall(reply)
    far.shutdown(socket.SHUT_WR)
    with far, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_connect", lambda *_: near)
        try:
            rows = scrape("http://server:1/metrics", soon())
        except ScrapeError as error:
            assert error.code in {FaultCode.PROTOCOL, FaultCode.UNREACHABLE}  # noqa: PT017
        else:
            assert [row["name"] for row in rows] == ["vllm:num_preemptions_total"]


@given(st.binary(max_size=400))
def test_any_bytes_are_rows_or_an_error(body: bytes) -> None:
    for text in (body, b"sglang:num_queue_reqs 1\n" + body, b"# TYPE vllm:x histogram\n" + body):
        try:
            rows = parse(text)
        except ScrapeError:
            continue
        assert all({"name", "kind", "samples"} <= row.keys() for row in rows)
