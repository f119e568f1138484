"""Writes that were given up while the engine still had them: polled on, since nothing can take them back."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

W = TypeVar("W")


class AbandonedWrites(ABC, Generic[W]):
    """Base of what holds an engine's writes; a member's bound `advance` would make a cycle that outlives a close."""

    def __init__(self) -> None:
        self._draining: list[W] = []
        self._drain_lock = threading.Lock()

    @abstractmethod
    def advance(self, write: W) -> bool:
        """Drives a write on; True when the engine has nothing of it any more, why is then in its `error`."""

    def drain(self, write: W) -> bool:
        """As `advance`; from now on also from `drain_on`."""
        with self._drain_lock:
            if self.advance(write):
                return True
            if write not in self._draining:
                self._draining.append(write)
            return False

    def drain_on(self) -> None:
        """Drives all writes on that were given up."""
        if self._draining:
            with self._drain_lock:
                self._draining = [write for write in self._draining if not self.advance(write)]
