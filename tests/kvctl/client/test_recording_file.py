"""Recording files: round trip of frames, and refusal of damaged files."""

from __future__ import annotations

import io
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.client import recording_file as form
from kvctl.client.recording_file import (
    Frame,
    RecordingError,
    RecordingVersionError,
    decompress,
    encode_frame,
    file_header,
    read_frames,
)

BODY = zlib.compress(b"answers" * 100)
WHOLE = b"".join(
    [
        file_header(),
        encode_frame(form.HEAD, {"version": "0.1.0"}),
        encode_frame(b"SNAP", {"later": True}, b"what this build does not know"),
        encode_frame(form.ANSWERS, {"agent": 0}, BODY),
        encode_frame(form.DONE, {"frames": 3}),
    ]
)


def read(data: bytes) -> list[Frame]:
    return list(read_frames(io.BytesIO(data)))


def test_frames_come_back_and_unknown_ones_are_passed_on() -> None:
    assert [found.kind for found in read(WHOLE)] == [form.HEAD, b"SNAP", form.ANSWERS]
    assert read(WHOLE)[2] == Frame(form.ANSWERS, {"agent": 0}, BODY)
    assert decompress(BODY) == b"answers" * 100


@pytest.mark.parametrize("end", range(0, len(WHOLE), 7))
def test_a_file_that_was_cut_short_says_so(end: int) -> None:
    with pytest.raises(RecordingError, match=r"not a kvctl recording|truncated"):
        read(WHOLE[:end])


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_no_byte_can_change_unseen(place: int, by: int) -> None:
    changed = bytearray(WHOLE)
    changed[place] ^= by
    try:
        found = read(bytes(changed))
    except RecordingError:
        return
    # Only a kind is not covered by the checksum; an unknown one is skipped.
    assert [one.about for one in found] == [one.about for one in read(WHOLE)]


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RecordingError):
        read(file_header() + data)


def test_another_format_is_named() -> None:
    with pytest.raises(RecordingVersionError, match="version 2, this kvctl reads version 1"):
        read(form.MAGIC + b"\x02\0\0\0")


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordingError, match="claims"):
        read(file_header() + form._FRAME.pack(form.ANSWERS, 2, form.MAX_BODY_BYTES + 1, 0) + b"{}")
    monkeypatch.setattr(form, "MAX_ANSWERS_BYTES", 1000)
    with pytest.raises(RecordingError, match="exceeds the size limit"):
        decompress(zlib.compress(bytes(100_000)))
    with pytest.raises(RecordingError, match="damaged"):
        decompress(b"not compressed")
