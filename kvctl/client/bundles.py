"""The archive of `kvctl debug bundle`: written so that an interrupt leaves a readable one, and read in memory.

A bundle is sent about, so it is read as what a stranger made: only plain files of the names that bundles have, within
bounds, each as its manifest says. Nothing of it is ever written to disk.
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

from kvctl_agent.contract import VERSION
from kvctl_agent.contract.recording import RecordingError, RecordingVersionError

MAGIC = b"\x28\xb5\x2f\xfd"  # of zstd
BUNDLE_VERSION = 1
MANIFEST = "manifest.json"
RECORDING = "recording.kvrec"

_MOST_BYTES = 1 << 30  # of all that is in it, unpacked
_MOST_FILES = 10_000
_MOST_MANIFEST_BYTES = 8 << 20
_MOST_HEADER_BYTES = 1 << 16  # tarfile takes seconds for a few megabytes of attributes
_LEVEL = 10
_BROKEN = (tarfile.TarError, ValueError, EOFError, IndexError, KeyError, OverflowError, struct.error, zlib.error)


def is_bundle(file: IO[bytes]) -> bool:
    """Whether it begins as one; leaves the file at its beginning."""
    begins = file.read(len(MAGIC))
    file.seek(0)
    return begins == MAGIC


def recording(file: IO[bytes]) -> bytes:
    """The recording in a bundle.

    Raises:
        RecordingError: it is no bundle, is damaged, cut short, or holds no recording.
        RecordingVersionError: it is of another version.
    """
    return _checked(file, RECORDING)[1]


def checked(file: IO[bytes]) -> dict[str, Any]:
    """The manifest of a bundle in which everything is as it says.

    Raises:
        RecordingError: it is not.
        RecordingVersionError: it is of another version.
    """
    return _checked(file)[0]


def _checked(file: IO[bytes], wanted: str | None = None) -> tuple[dict[str, Any], bytes]:
    """The manifest, and the contents of the file that is wanted."""
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
        raise RecordingError("it is no bundle of kvctl: it has no manifest")
    if wanted is not None and wanted not in checksums:
        raise RecordingError("this bundle holds no recording: its manifest says why (kvctl debug show)")
    listed = {each["name"]: each["sha256"] for each in manifest["files"]}
    for name in (*listed, *((wanted,) if wanted is not None else ())):
        if checksums.get(name) != listed.get(name):
            raise RecordingError(f"it is damaged: {name!r:.60} is not what its manifest says")
    return manifest, found


def _manifest(data: bytes) -> dict[str, Any]:
    """The manifest, its version checked."""
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


def members(file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a bundle.

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
                if info.name == MANIFEST and info.size > _MOST_MANIFEST_BYTES:
                    raise RecordingError(f"it is damaged: its manifest claims {info.size} bytes")
                reader = archive.extractfile(info)
                data = reader.read() if reader else b""
                if len(data) != info.size:
                    raise RecordingError("it was cut short: a file in it has no end")
                yield info.name, data
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the bundle, as its manifest lists it."""

    name: str
    bytes: int
    sha256: str
    what: str


class Archive:
    """A bundle that is being written. What is added is in it as a whole, and Ctrl-C comes before or after."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        packer = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)
        self._packer = cast(IO[bytes], packer)
        self._tar = tarfile.open(fileobj=self._packer, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # see end
        self._at = int(time.time())
        self.entries: list[Entry] = []

    def add(self, name: str, data: bytes | IO[bytes], what: str) -> None:
        """A file; one that is open is read from its beginning."""
        file = io.BytesIO(data) if isinstance(data, bytes) else data
        file.seek(0)
        checksum = hashlib.file_digest(cast(io.BytesIO, file), "sha256").hexdigest()
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        with undisturbed():
            self._write(name, file, size)
            self.entries.append(Entry(name, size, checksum, what))

    def end(self, about: dict[str, Any]) -> None:
        """Adds the manifest, which says `about` besides what is in the bundle, and closes it."""
        manifest = {
            "bundle": BUNDLE_VERSION,
            "kvctl": VERSION,
            **about,
            "files": [asdict(entry) for entry in self.entries],
        }
        data = orjson.dumps(manifest, option=orjson.OPT_INDENT_2)
        with undisturbed():
            self._write(MANIFEST, io.BytesIO(data), len(data))
            self._tar.close()
            self._packer.close()

    def _write(self, name: str, file: IO[bytes], size: int) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = size, self._at, 0o600
        self._tar.addfile(info, file)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits until what is inside is done."""
    came: list[int] = []

    def later(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # whoever ignores it, as what a shell runs in the background does, goes on doing so
        yield
        return
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
