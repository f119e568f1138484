"""The archive of `kvctl debug bundle`, read in memory: nothing of it is ever written to disk.

A bundle is sent about, so it is read as what a stranger made: only plain files of the names that bundles have, within
bounds, each as its manifest says.
"""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Self, cast

import orjson

from kvctl_agent.contract.recording import RecordingError, RecordingVersionError

MAGIC = b"\x28\xb5\x2f\xfd"  # of zstd
BUNDLE_VERSION = 1
MANIFEST = "manifest.json"
RECORDING = "recording.kvrec"

_MOST_BYTES = 1 << 30  # of all that is in it, unpacked
_MOST_FILES = 10_000
_MOST_MANIFEST_BYTES = 8 << 20
_MOST_HEADER_BYTES = 1 << 16  # tarfile takes seconds for a few megabytes of attributes
_BROKEN = (tarfile.TarError, ValueError, EOFError, IndexError, KeyError, OverflowError, struct.error, zlib.error)


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a bundle."""

    name: str
    data: bytes


def is_bundle(file: IO[bytes]) -> bool:
    """Whether it begins as one; leaves the file at its beginning."""
    begins = file.read(len(MAGIC))
    file.seek(0)
    return begins == MAGIC


@contextmanager
def recording(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The recording in a bundle.

    Raises:
        RecordingError: it is no bundle, is damaged, cut short, or holds no recording.
        RecordingVersionError: it is one of another version.
    """
    manifest: dict[str, Any] | None = None
    found: bytes | None = None
    for member in members(file, {MANIFEST, RECORDING}):
        if member.name == MANIFEST:
            manifest = parsed_manifest(member.data)
        else:
            found = member.data
    if manifest is None:
        raise RecordingError("it is no bundle of kvctl: it has no manifest")
    if found is None:
        raise RecordingError("this bundle holds no recording: its manifest says why (kvctl debug show)")
    check(manifest, RECORDING, found)
    with io.BytesIO(found) as inner:
        yield inner


def parsed_manifest(data: bytes) -> dict[str, Any]:
    """The manifest, its version checked.

    Raises:
        RecordingError: it is none.
        RecordingVersionError: it is of another version.
    """
    try:
        manifest = orjson.loads(data)
        version, files = manifest["bundle"], manifest["files"]
        well = isinstance(files, list) and all(
            isinstance(each["name"], str) and isinstance(each["sha256"], str) and type(each["bytes"]) is int
            for each in files
        )
    except (ValueError, KeyError, TypeError):
        raise RecordingError("it is damaged: its manifest cannot be read") from None
    if version != BUNDLE_VERSION:
        raise RecordingVersionError(
            f"its form is version {version!r:.20}, this kvctl reads version {BUNDLE_VERSION}: "
            "read it with the kvctl that made it"
        )
    if not well:
        raise RecordingError("it is damaged: its manifest does not say what is in it")
    return cast(dict[str, Any], manifest)


def checked(file: IO[bytes]) -> dict[str, Any]:
    """The manifest of a bundle in which everything is as it says.

    Raises:
        RecordingError: it is not.
        RecordingVersionError: it is of another version.
    """
    found: dict[str, str] = {}
    manifest: dict[str, Any] | None = None
    for member in members(file):
        if member.name == MANIFEST:
            manifest = parsed_manifest(member.data)
        found[member.name] = hashlib.sha256(member.data).hexdigest()
    if manifest is None:
        raise RecordingError("it is no bundle of kvctl: it has no manifest")
    for each in manifest["files"]:
        if found.get(each["name"]) != each["sha256"]:
            raise RecordingError(f"it is damaged: {each['name']!r:.60} is not what its manifest says")
    return manifest


def check(manifest: dict[str, Any], name: str, data: bytes) -> None:
    """Raises RecordingError where `data` is not what the manifest says."""
    checksums = {each["name"]: each["sha256"] for each in manifest["files"]}
    if checksums.get(name) != hashlib.sha256(data).hexdigest():
        raise RecordingError(f"it is damaged: {name} is not what its manifest says")


def members(file: IO[bytes], wanted: set[str] | None = None) -> Iterator[Member]:
    """The files of a bundle; those that are not `wanted` are passed over unread.

    Raises:
        RecordingError: it is no archive, is cut short, or holds what no bundle does.
    """
    import zstandard

    count = 0
    try:
        with (
            zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file, read_across_frames=False) as plain,
            tarfile.open(fileobj=cast(IO[bytes], _Bounded(plain)), mode="r|", tarinfo=_Header) as archive,
        ):
            for info in archive:
                count += 1
                if count > _MOST_FILES or not info.isreg() or info.issparse() or "/../" in f"/{info.name}/":
                    raise RecordingError(f"it is no bundle of kvctl: it holds {info.name!r:.60}, which none does")
                if wanted is not None and info.name not in wanted:
                    continue
                if info.name == MANIFEST and info.size > _MOST_MANIFEST_BYTES:
                    raise RecordingError(f"it is damaged: its manifest claims {info.size} bytes")
                reader = archive.extractfile(info)
                data = reader.read() if reader else b""
                if len(data) != info.size:
                    raise RecordingError("it was cut short: a file in it has no end")
                yield Member(info.name, data)
    except zstandard.ZstdError:
        raise RecordingError("it is damaged, or was cut short: it cannot be unpacked") from None
    except _BROKEN as error:
        raise RecordingError(f"it is damaged, or was cut short: {error}") from None


class _Header(tarfile.TarInfo):
    """A member's header; one with a long name or attributes of its own is refused before they are read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if not header.isreg() and header.size > _MOST_HEADER_BYTES:
            raise RecordingError(f"it is no bundle of kvctl: a header in it has {header.size} bytes, which none does")
        return header


class _Bounded:
    """Reads no more of an archive than any that is written has, however much it becomes."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._left = _MOST_BYTES

    def read(self, size: int) -> bytes:
        if size > self._left:
            raise RecordingError(f"it unpacks to more than {_MOST_BYTES >> 20} MiB, which no bundle does")
        data: bytes = self._plain.read(size)
        self._left -= len(data)
        return data
