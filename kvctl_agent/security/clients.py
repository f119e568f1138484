"""Who may use an agent's admin endpoint, read anew when the file changes: a key that is taken out is out at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from kvctl_agent.contract.commands import Level
from kvctl_agent.contract.keys import Client, KeyFileError, read_clients


class Clients:
    """The file of clients; `level` may be asked from any thread."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        """Reads the file.

        Args:
            complain: told in words, once per change, when the file cannot be used any more.

        Raises:
            KeyFileError: it cannot be used now.
        """
        self._path = path
        self._complain = complain
        self._lock = threading.Lock()
        self._version = self._look()
        self._known: Mapping[bytes, Client] = read_clients(path)

    def level(self, public: bytes) -> Level | None:
        """What the owner of this key may do; None for nothing."""
        with self._lock:
            version = self._look()
            if version != self._version:
                self._version = version
                self._known = self._read_again()
            client = self._known.get(public)
        return client.level if client is not None else None

    def _read_again(self) -> Mapping[bytes, Client]:
        try:
            return read_clients(self._path)
        except KeyFileError as error:
            self._complain(f"{error}; until it is mended no key is let in")
            return {}

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
