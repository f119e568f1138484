"""Reads and writes the archive of `kvctl debug bundle`: tar compressed with zstd, with a manifest of its files.

An interrupt during writing leaves a valid archive. Bundles are untrusted input: they may contain only regular
files within size limits whose checksums match the manifest, and reading never writes to disk.
"""

from __future__ import annotations

import hashlib
import io
import signal
import struct
import tarfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO, Any, Self, cast

import orjson

from kvctl.client.recording_file import RecordingError, RecordingVersionError
from kvctl_agent.contract import VERSION

MAGIC = b"\x28\xb5\x2f\xfd"  # of zstd
BUNDLE_VERSION = 1
MANIFEST = "manifest.json"
RECORDING = "recording.kvrec"

_MAX_BYTES = 1 << 30  # all files, decompressed
_MAX_FILES = 10_000
_MAX_MANIFEST_BYTES = 8 << 20
_MAX_HEADER_BYTES = 1 << 16  # tarfile takes seconds for a few megabytes of attributes
_LEVEL = 10
_DAMAGED = (tarfile.TarError, ValueError, EOFError, IndexError, KeyError, OverflowError, struct.error, zlib.error)


def is_bundle(file: IO[bytes]) -> bool:
    """Returns whether an open file begins with the magic bytes of a bundle; resets its position to the beginning."""
    magic = file.read(len(MAGIC))
    file.seek(0)
    return magic == MAGIC


def recording(file: IO[bytes]) -> bytes:
    """Verifies the checksums of a bundle, and returns the bytes of the recording in it.

    Raises:
        RecordingError: the file is not a bundle, is damaged or truncated, or has no recording.
        RecordingVersionError: the bundle has another version.
    """
    return _checked(file, RECORDING)[1]


def checked(file: IO[bytes]) -> dict[str, Any]:
    """Verifies the checksums of a bundle; returns its manifest.

    Raises:
        RecordingError: a file differs from the manifest, or the bundle is damaged.
        RecordingVersionError: the bundle has another version.
    """
    return _checked(file)[0]


def _checked(file: IO[bytes], wanted: str | None = None) -> tuple[dict[str, Any], bytes]:
    """Verifies the checksums; returns the manifest and the contents of the file `wanted`, b"" if it is None.

    Raises:
        RecordingError, RecordingVersionError: as for `recording`.
    """
    checksums: dict[str, str] = {}
    manifest: dict[str, Any] | None = None
    found = b""
    for name, data in members(file):
        if name == MANIFEST:
            manifest = _manifest(data)
        elif name == wanted:
            found = data
        checksums[name] = hashlib.sha256(data).hexdigest()
    if manifest is None:
        raise RecordingError("it is not a bundle of kvctl: it has no manifest")
    if wanted is not None and wanted not in checksums:
        raise RecordingError("this bundle has no recording: kvctl debug show gives the reason")
    listed = {each["name"]: each["sha256"] for each in manifest["files"]}
    for name in (*listed, *((wanted,) if wanted is not None else ())):
        if checksums.get(name) != listed.get(name):
            raise RecordingError(f"it is damaged: {name!r:.60} differs from the manifest")
    return manifest, found


def _manifest(data: bytes) -> dict[str, Any]:
    """Decodes the manifest and checks its version and structure; raises as `recording` does."""
    try:
        manifest = orjson.loads(data)
        version, files = manifest["bundle"], manifest["files"]
        well_formed = isinstance(files, list) and all(
            isinstance(each["name"], str) and isinstance(each["sha256"], str) and type(each["bytes"]) is int
            for each in files
        )
    except (ValueError, KeyError, TypeError):
        raise RecordingError("it is damaged: its manifest cannot be read") from None
    if version != BUNDLE_VERSION:
        raise RecordingVersionError(
            f"its format is version {version!r:.20}, this kvctl reads version {BUNDLE_VERSION}: "
            "read it with the kvctl that made it"
        )
    if not well_formed:
        raise RecordingError("it is damaged: its manifest does not list the files")
    return cast(dict[str, Any], manifest)


def members(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and contents of each file in a bundle.

    Raises:
        RecordingError: the file is not an archive, is truncated, or has members that kvctl does not write.
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
                if count > _MAX_FILES or not info.isreg() or info.issparse() or "/../" in f"/{info.name}/":
                    raise RecordingError(f"it is not a bundle of kvctl: it has {info.name!r:.60}, which no bundle has")
                if info.name == MANIFEST and info.size > _MAX_MANIFEST_BYTES:
                    raise RecordingError(f"it is damaged: its manifest claims {info.size} bytes")
                reader = archive.extractfile(info)
                data = reader.read() if reader else b""
                if len(data) != info.size:
                    raise RecordingError("it is truncated: the end of a file is missing")
                yield info.name, data
    except zstandard.ZstdError:
        raise RecordingError("it is damaged or truncated: it cannot be decompressed") from None
    except _DAMAGED as error:
        raise RecordingError(f"it is damaged or truncated: {error}") from None


class _Header(tarfile.TarInfo):
    """Header of a member; rejects large extended headers before reading them."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        header = super().frombuf(buf, encoding, errors)
        if not header.isreg() and header.size > _MAX_HEADER_BYTES:
            raise RecordingError(f"it is not a bundle of kvctl: its headers are too large ({header.size} bytes)")
        return header


class _Bounded:
    """Readable stream that limits the decompressed size of an archive."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain
        self._left = _MAX_BYTES

    def read(self, size: int) -> bytes:
        if size > self._left:
            raise RecordingError(f"it decompresses to more than {_MAX_BYTES >> 20} MiB, which no bundle does")
        data: bytes = self._plain.read(size)
        self._left -= len(data)
        return data


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of one file in the manifest: its name, size, checksum, and `what` it contains, as text for the user."""

    name: str
    bytes: int
    sha256: str
    what: str


class Archive:
    """Writes a bundle; Ctrl-C takes effect before or after a file is added, never in between."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        packer = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)
        self._packer = cast(IO[bytes], packer)
        self._tar = tarfile.open(fileobj=self._packer, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # see end
        self._at = int(time.time())
        self.entries: list[Entry] = []

    def add(self, name: str, data: bytes | IO[bytes], what: str) -> None:
        """Adds a file with contents `data`; an open file is read from its beginning. `what` describes the contents."""
        file = io.BytesIO(data) if isinstance(data, bytes) else data
        file.seek(0)
        checksum = hashlib.file_digest(cast(io.BytesIO, file), "sha256").hexdigest()
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        with _delayed_interrupt():
            self._write(name, file, size)
            self.entries.append(Entry(name, size, checksum, what))

    def end(self, about: dict[str, Any]) -> None:
        """Adds the manifest, which has the fields `about` and the list of files, and closes the archive."""
        manifest = {
            "bundle": BUNDLE_VERSION,
            "kvctl": VERSION,
            **about,
            "files": [asdict(entry) for entry in self.entries],
        }
        data = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
        with _delayed_interrupt():
            self._write(MANIFEST, io.BytesIO(data), len(data))
            self._tar.close()
            self._packer.close()

    def _write(self, name: str, file: IO[bytes], size: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = size, self._at, 0o600
        self._tar.addfile(info, file)


@contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delays the KeyboardInterrupt of a Ctrl-C until the end of the block."""
    received: list[int] = []

    def delay(number: int, _: FrameType | None) -> None:
        received.append(number)

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, as by background jobs of a shell; it stays so
        yield
        return
    signal.signal(signal.SIGINT, delay)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt
