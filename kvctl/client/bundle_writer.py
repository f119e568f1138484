"""Writes the archive of `kvctl debug bundle`: an interrupt leaves one that can be read."""

from __future__ import annotations

import hashlib
import io
import signal
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import IO, Any, cast

import orjson
import zstandard

from kvctl.client.bundle_reader import BUNDLE_VERSION, MANIFEST
from kvctl_agent.contract.version import VERSION

_LEVEL = 10
_PIECE = 1 << 20


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
        self._packer = zstandard.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False)
        packed = cast(IO[bytes], self._packer)
        self._tar = tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115  # see end
        self._at = int(time.time())
        self.entries: list[Entry] = []

    def add(self, name: str, data: bytes | IO[bytes], what: str) -> None:
        """A file; one that is open is read from its beginning."""
        file = io.BytesIO(data) if isinstance(data, bytes) else data
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        checksum = hashlib.sha256()
        while piece := file.read(_PIECE):
            checksum.update(piece)
        file.seek(0)
        with undisturbed():
            self._write(name, file, size)
            self.entries.append(Entry(name, size, checksum.hexdigest(), what))

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
            self._packer.flush(zstandard.FLUSH_FRAME)

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
