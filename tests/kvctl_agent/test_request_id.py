"""Room numbers of request ids: the same everywhere, for ever; digests of prompts; request ids and trace contexts."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent import prompt_digest, room_number
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


class TestPromptDigest:
    TOKENS = (1, 2, 1 << 40, -1)

    def test_it_never_changes(self) -> None:
        assert prompt_digest(()) == 3_149_896_333_092_397_096
        digest = prompt_digest(self.TOKENS, lora="ä", salt="s", media=["a", "b"])
        assert digest == int.from_bytes(
            hashlib.blake2b(
                struct.pack("<q4q", 4, *self.TOKENS)
                + b"".join(struct.pack("<q", len(text)) + text for text in ("ä".encode(), b"s", b"a", b"b")),
                digest_size=8,
            ).digest(),
            "big",
        )

    def test_the_kind_of_list_does_not_matter(self) -> None:
        kinds: list[Any] = [tuple, list, lambda each: array("q", each), np.array, torch.tensor]
        assert len({prompt_digest(kind(self.TOKENS)) for kind in kinds}) == 1
        assert prompt_digest(b"ab") == prompt_digest([97, 98])

    def test_each_thing_changes_it(self) -> None:
        digests = [
            prompt_digest([1, 2]),
            prompt_digest([2, 1]),
            prompt_digest([1, 2, 0]),
            *(prompt_digest([1, 2], **{name: "x"}) for name in ("lora", "salt", "media")),
            prompt_digest([1, 2], media=["", "x"]),
            prompt_digest([1, 2], salt="\udc80"),
        ]
        assert len(set(digests)) == len(digests)
        assert all(0 < digest < 1 << 64 for digest in digests)

    @pytest.mark.parametrize("tokens", [None, "12", [1.5], [1 << 63], [[1]], 5])
    def test_what_is_no_list_of_tokens_is_refused(self, tokens: Any) -> None:
        with pytest.raises(LocalProtocolError, match=r"tokens is .*: it must be a list of integers"):
            prompt_digest(tokens)


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
