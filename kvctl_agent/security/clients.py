"""Clients permitted on an agent's admin endpoint; the client file is read again whenever it changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvctl_agent.contract.commands import Level
from kvctl_agent.contract.keys import Client, KeyFileError, read_clients


class Clients:
    """Permissions from the client file; any thread may call `level`."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        """Reads the file.

        Args:
            path: the client file.
            complain: called with an error text, once per change, if the changed file cannot be used.

        Raises:
            KeyFileError: the file cannot be used.
        """
        self._path = path
        self._complain = complain
        self._lock = threading.Lock()
        self._version = self._file_version()
        self._known: Mapping[bytes, Client] = read_clients(path)

    def level(self, public: bytes) -> Level | None:
        """Returns the level of the client with this public key; None if it is not listed."""
        with self._lock:
            version = self._file_version()
            if version != self._version:
                self._version = version
                self._known = self._read_again()
            client = self._known.get(public)
        return client.level if client is not None else None

    def _read_again(self) -> Mapping[bytes, Client]:
        try:
            return read_clients(self._path)
        except KeyFileError as error:
            self._complain(f"{error}; no client is accepted until the file is corrected")
            return {}

    def _file_version(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
