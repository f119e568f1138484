"""Room numbers of request ids: the same everywhere, for ever; request ids and trace contexts beside rooms."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvctl_agent import room_number
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.request_id import check_request_id, valid_traceparent

KNOWN = {
    "cmpl-1": 2_078_862_653_551_119_842,
    "chatcmpl-7f3a9d52-4b0e-4c29-9be1-0d4a27c1a2f4": 6_414_547_098_448_422_643,
    "ä€😀": 16_820_322_840_791_135_299,
}


@pytest.mark.parametrize("request_id", KNOWN)
def test_a_number_never_changes(request_id: str) -> None:
    assert room_number(request_id) == KNOWN[request_id]


def test_another_process_computes_the_same_number() -> None:
    code = "import kvctl_agent; print(kvctl_agent.room_number('cmpl-1'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert int(out) == room_number("cmpl-1")


def test_many_ids_have_different_numbers_over_the_whole_range() -> None:
    numbers = {room_number(f"cmpl-{number}") for number in range(20_000)}
    assert len(numbers) == 20_000
    assert 0 <= min(numbers) < 1 << 56
    assert (1 << 64) - (1 << 56) < max(numbers) < 1 << 64


@pytest.mark.parametrize("request_id", ["", "x" * 1025, True, 7, None, b"cmpl-1", "\udcff"])
def test_what_is_no_request_id_is_refused(request_id: str) -> None:
    with pytest.raises(LocalProtocolError, match="request id is "):
        room_number(request_id)


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("request_id", "stored"),
    [
        ("cmpl-1", "cmpl-1"),
        ("", ""),
        ("x" * 257, "x" * 256),
        ("a\udcff", r"a\udcff"),
        ("\udcff" * 300, r"\udcff" * 42 + r"\udc"),
    ],
)
def test_a_request_id_beside_a_room_is_short_and_can_be_encoded(request_id: str, stored: str) -> None:
    assert check_request_id(7, request_id) == stored


@pytest.mark.parametrize("value", [None, 7, b"cmpl-1"])
def test_a_request_id_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(LocalProtocolError, match=r"room 7: request_id is .*: it must be text"):
        check_request_id(7, value)


@pytest.mark.parametrize("value", [PARENT, PARENT.replace("00-", "cc-", 1)])
def test_a_valid_traceparent_is_kept(value: str) -> None:
    assert valid_traceparent(value) == value


def test_further_fields_of_later_versions_are_dropped() -> None:
    later = PARENT.replace("00-", "cc-", 1)
    assert valid_traceparent(f"{later}-what-comes") == later


@pytest.mark.parametrize(
    "value",
    [
        *("", "garbage", PARENT.upper(), PARENT[:-1], f"{PARENT}0", f"{PARENT}-more", f"{PARENT}\n"),
        PARENT.replace("00-", "ff-", 1),
        PARENT.replace(TRACE, "0" * 32),
        PARENT.replace("00f067aa0ba902b7", "0" * 16),
        *(None, 7, PARENT.encode()),
    ],
)
def test_an_invalid_traceparent_is_ignored(value: object) -> None:
    assert valid_traceparent(value) == ""
