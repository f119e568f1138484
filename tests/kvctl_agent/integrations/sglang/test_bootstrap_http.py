"""What a bootstrap server answers, whose address comes with a request, costs that request and nothing else."""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc
from collections.abc import Iterable, Iterator

import pytest

from kvctl_agent.errors import KvctlError
from kvctl_agent.integrations.sglang.bootstrap_http import BootstrapClient, BootstrapError
from tests.support.http_answers import HEADER, serving
from tests.support.sglang import managers
from tests.support.sglang.cases import Case, Model, Ranks, Room
from tests.support.sglang.pair import PDPair

ROW = HEADER + b'{"rank_ip": %s, "rank_port": %s}'
SIZES = b'"page_size": null, "kv_cache_dtype": null, "follow_bootstrap_room": false}'
WRONG = {
    "a port of infinity": ROW % (b'"127.0.0.1"', b"Infinity"),
    "a port over all numbers": ROW % (b'"127.0.0.1"', b"1e999"),
    "a port of 5000 digits": ROW % (b'"127.0.0.1"', b'"' + b"9" * 5000 + b'"'),
    "a port of too many": ROW % (b'"127.0.0.1"', b"65536"),
    "half a bracket": ROW % (b'"[::1"', b"1"),
    "a path": ROW % (b'"127.0.0.1/"', b"1"),
    "no text": ROW % (b"[]", b"1"),
    "lists in lists": HEADER + b"[" * 100_000,
    "objects in objects": HEADER + b'{"rank_ip":' * 100_000,
    "a list": HEADER + b"[1]",
    "nothing": b"",
    "no HTTP": b"SSH-2.0-OpenSSH\r\n",
    "no JSON": HEADER + b"\xff\xfe",
    "an error of 500 kB": b"HTTP/1.1 500 \xff\r\n\r\n" + b"x" * 500_000,
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    "a length of petabytes": b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n{}",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    "chunks that are none": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "a chunk of petabytes": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffff\r\n{}",
    "headers without end": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000,
    "no ranks": HEADER + b'{"attn_tp_size": 0, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, ' + SIZES,
    "ranks without end": HEADER + b'{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1e12, ' + SIZES,
    "a dp rank that is no number": HEADER + b'{"1000": "x", "1001": [], "1002": 1e999}',
}  # fmt: skip


def endless() -> Iterator[bytes]:
    return itertools.chain([HEADER], itertools.repeat(b" " * (1 << 16)))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_one_kind_of_error(name: str) -> None:
    with serving(WRONG[name]) as address:
        with pytest.raises(KvctlError) as error:
            BootstrapClient().row(address, 0, 20.0)
        assert len(str(error.value)) < 300
        str(error.value).encode()


@pytest.mark.parametrize("address", ["not a host/::", "[::1:80", "a@127.0.0.1:1", "\u3002.:80", "h\r\nX: y:80", "None"])
def test_a_wrong_address_is_the_same_kind(address: str) -> None:
    with pytest.raises(KvctlError):
        BootstrapClient().row(address, 0, 20.0)


@pytest.mark.parametrize(
    "answer",
    [
        ROW % (b'"::1"', b'"7000"'),
        b"HTTP/1.1 100 Continue\r\n\r\n" + ROW % (b'"::1"', b"7000"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'1\r\n{\r\n25\r\n"rank_ip": "::1", "rank_port": 7000 }\r\n0\r\n\r\n',
    ],
)
def test_the_address_of_a_rank_is_read(answer: bytes) -> None:
    with serving(answer) as address:
        assert str(BootstrapClient().row(address, 0, 20.0)) == "tcp://[::1]:7000"


@pytest.mark.parametrize("pieces", [[bytes([byte]) for byte in ROW % (b'"::1"', b"1")], itertools.repeat(b"H")])
def test_an_answer_byte_by_byte_ends_at_the_deadline(pieces: Iterable[bytes]) -> None:
    """The deadline is of the whole exchange; with one for each read, this server could hold a thread for ever."""
    with serving(pieces, pause_s=0.02) as address, pytest.raises(BootstrapError, match="has not answered in time"):
        BootstrapClient().fetch("GET", f"http://{address}/route", wait_s=20.0, total_s=0.1)


def test_an_endless_answer_takes_no_more_memory_than_the_limit() -> None:
    tracemalloc.start()
    try:
        with serving(endless()) as address, pytest.raises(BootstrapError, match="larger than 1 MiB"):
            BootstrapClient().fetch("GET", f"http://{address}/route", wait_s=20.0)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_call_waits_no_second_time_and_takes_the_answer_that_came_late() -> None:
    told = threading.Event()

    def late() -> Iterator[bytes]:
        told.wait(20)
        yield ROW % (b'"::1"', b"7000")

    client = BootstrapClient()
    with serving(late()) as address:
        for wait_s in (0.01, 20.0):  # the second one would wait for 20 s
            with pytest.raises(BootstrapError, match="has not answered within"):
                client.fetch("GET", f"http://{address}/route", wait_s=wait_s)
        told.set()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert client.fetch("GET", f"http://{address}/route").json() == {"rank_ip": "::1", "rank_port": 7000}
            except BootstrapError:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            else:
                break


def test_without_a_thread_a_server_is_not_asked_and_can_be_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = BootstrapClient()
    with serving(ROW % (b'"::1"', b"7000")) as address:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(BootstrapError, match="is not asked: can't start"):
                client.fetch("GET", f"http://{address}/route")
        assert client.fetch("GET", f"http://{address}/route", wait_s=20.0).json()["rank_port"] == 7000


def test_slow_servers_are_not_asked_without_end() -> None:
    client = BootstrapClient()
    with serving(itertools.repeat(b"H"), pause_s=0.05) as address:
        texts = []
        for number in range(10):
            with pytest.raises(BootstrapError) as error:
                client.fetch("GET", f"http://{address}/route?{number}", wait_s=0.0, total_s=0.5)
            texts.append(str(error.value))
    assert [text for text in texts if "is not asked" in text] == texts[8:]


def test_sglangs_scheduler_fails_the_request_with_the_cause_and_goes_on() -> None:
    with PDPair(Case("kvctl", Ranks(), Ranks(), Model(heads=4, layers=2))) as pair:
        pair.transfer([Room(1, tokens=100)]).check()
        (causes,) = pair.call("decode", managers.ask_hostile_servers, WRONG).values()
        assert causes.keys() == WRONG.keys()
        assert {name: cause for name, cause in causes.items() if "gives no address of dp rank 0" not in cause} == {}
        for role in ("prefill", "decode"):
            (odd,) = pair.call(role, managers.begin_odd_rooms).values()
            assert len(odd) == len(managers.ODD_ROOMS)
            assert [
                cause for cause in odd if "it must be a whole number from 0 to 18446744073709551615" not in cause
            ] == []
        pair.transfer([Room(2, tokens=100)]).check()
