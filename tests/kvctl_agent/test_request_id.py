"""Room numbers of request ids: the same everywhere, for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvctl_agent import room_number
from kvctl_agent.errors import LocalProtocolError

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
