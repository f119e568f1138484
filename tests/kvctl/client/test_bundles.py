"""Untrusted bundles: every limit and checksum is enforced, and nothing is written to disk."""

from __future__ import annotations

import hashlib
import io
import signal
import tarfile
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.client import bundles
from kvctl.client import recording_file as form
from kvctl.client.bundles import MANIFEST, RECORDING, Archive, checked, members
from kvctl.client.recording_file import RecordingError
from kvctl.client.recordings import RecordingSource
from kvctl.errors import CliError

RECORDED = b"".join(
    [
        form.file_header(),
        form.encode_frame(
            form.MOMENT,
            {"moment": 0, "at_ns": 1, "agents": 0, "form": 2},
            zlib.compress(b'{"directory":"/run","stale":[],"faults":[],"left_out":[]}'),
        ),
        form.encode_frame(form.DONE, {"frames": 1}),
    ]
)


def whole() -> bytes:
    file = io.BytesIO()
    archive = Archive(file)
    archive.add(RECORDING, RECORDED, "moments")
    archive.add("status.txt", b"all is well", "the fleet")
    archive.end({"partial": False})
    return file.getvalue()


def packed(*infos: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for info, data in infos:
            info.size = info.size or len(data)
            archive.addfile(info, io.BytesIO(data.ljust(info.size, b"\0")) if info.isreg() else None)
    return zstandard.compress(file.getvalue())


def manifest(version: Any = 1, checksum: str = hashlib.sha256(RECORDED).hexdigest()) -> bytes:
    files = [{"name": RECORDING, "bytes": len(RECORDED), "sha256": checksum, "what": ""}]
    return orjson.dumps({"bundle": version, "kvctl": "9", "files": files})


def info(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


def with_attributes(name: str, nbytes: int) -> tarfile.TarInfo:
    """Extended headers: tarfile takes a minute for 600 MB of them, which zstd compresses to 20 kB."""
    made = info(name)
    made.pax_headers = {"comment": "A" * nbytes}
    return made


def refusal(data: bytes, tmp_path: Path) -> CliError:
    path = tmp_path / "b.tar.zst"
    path.write_bytes(data)
    with pytest.raises(CliError) as refused:
        RecordingSource(path)
    assert [each.name for each in tmp_path.iterdir()] == ["b.tar.zst"]
    assert "\n" not in str(refused.value)
    return refused.value


def test_a_bundle_is_read_and_any_tar_can_unpack_it(tmp_path: Path) -> None:
    path = tmp_path / "b.tar.zst"
    path.write_bytes(whole())
    assert list(RecordingSource(path).moments) == [1]
    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(whole())).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        assert archive.getnames() == [RECORDING, "status.txt", MANIFEST]
        assert {(each.mode, each.uname, each.gname, each.uid) for each in archive} == {(0o600, "", "", 0)}
    found = checked(io.BytesIO(whole()))
    assert [each["name"] for each in found["files"]] == [RECORDING, "status.txt"]


@pytest.mark.parametrize(
    ("made", "told", "code"),
    [
        (lambda: whole()[:-40], "truncated", 1),
        (lambda: whole()[:6], "truncated", 1),
        (lambda: zstandard.compress(b"no tar" * 1000), "damaged", 1),
        (lambda: packed((info("notes.txt"), b"hello")), "it has no manifest", 1),
        (lambda: packed((info(MANIFEST), manifest())), "has no recording", 1),
        (lambda: packed((info(MANIFEST), manifest(2)), (info(RECORDING), RECORDED)), "version 2", 6),
        (lambda: packed((info(MANIFEST), manifest("x" * 999)), (info(RECORDING), RECORDED)), "version 'xxx", 6),
        (lambda: packed((info(MANIFEST), b"{"), (info(RECORDING), RECORDED)), "manifest cannot be read", 1),
        (lambda: packed((info(MANIFEST), b'{"bundle":1,"files":[5]}'), (info(RECORDING), b"")), "manifest", 1),
        (
            lambda: packed((info(MANIFEST), manifest(checksum="0")), (info(RECORDING), RECORDED)),
            "differs from the manifest",
            1,
        ),
        (lambda: packed((info("../etc/passwd"), b"x")), "'../etc/passwd', which no bundle has", 1),
        (lambda: packed((info(RECORDING, tarfile.SYMTYPE, "/etc/passwd"), b"")), "which no bundle has", 1),
        (lambda: packed((info("pipe", tarfile.FIFOTYPE), b"")), "which no bundle has", 1),
        (lambda: packed((info("disk", tarfile.BLKTYPE), b"")), "which no bundle has", 1),
        (lambda: packed((with_attributes("a", 1 << 17), b"")), "headers are too large (131", 1),
        (lambda: packed((info("a" * (1 << 17)), b"")), "headers are too large (131", 1),
    ],
)
def test_what_is_no_whole_bundle_is_refused_in_one_line(made: Any, told: str, code: int, tmp_path: Path) -> None:
    error = refusal(made(), tmp_path)
    assert told in str(error)
    assert error.code == code


def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_MAX_BYTES", 1 << 20)
    bomb = packed((info(RECORDING), bytes(64 << 20)))
    assert len(bomb) < 1 << 20
    assert "decompresses to more than 1 MiB" in str(refusal(bomb, tmp_path))
    monkeypatch.setattr(bundles, "_MAX_FILES", 3)
    many = packed(*((info(f"{number}"), b"") for number in range(4)))
    assert "which no bundle has" in str(refusal(many, tmp_path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=200)
@given(place=st.integers(0, 1 << 16), by=st.integers(1, 255), length=st.none() | st.integers(4, 1 << 16))
def test_whatever_happens_to_a_bundle_is_told(place: int, by: int, length: int | None, tmp_path: Path) -> None:
    changed = bytearray(whole())
    changed[place % len(changed)] ^= by
    path = tmp_path / "b.tar.zst"
    path.write_bytes(changed if length is None else changed[: length % len(changed)])
    try:
        RecordingSource(path).survey()
    except CliError:
        return


PLAIN = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(whole())).read()


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(PLAIN) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_happens_to_the_archive_inside_is_told(changes: list[tuple[int, int]]) -> None:
    """zstd normally has its own checksum; an untrusted bundle may have a matching one."""
    changed = bytearray(PLAIN)
    for place, value in changes:
        changed[place] = value
    try:
        for _, data in members(io.BytesIO(zstandard.compress(bytes(changed)))):
            assert len(data) <= len(PLAIN)
    except RecordingError:
        return


def test_an_interrupt_comes_before_or_after_a_file_and_never_within(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    archive = Archive(file)
    archive.add("a.txt", b"a", "a")
    write = archive._write

    def interrupted(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write(*args)

    monkeypatch.setattr(archive, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        archive.add("b.txt", b"b", "b")
    monkeypatch.undo()
    archive.end({"partial": True})
    assert [each["name"] for each in checked(io.BytesIO(file.getvalue()))["files"]] == ["a.txt", "b.txt"]


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with bundles._delayed_interrupt():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
