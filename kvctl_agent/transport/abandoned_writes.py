"""Abandoned writes, which cannot be cancelled and are polled until the engine has finished them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

W = TypeVar("W")


class AbandonedWrites(ABC, Generic[W]):
    """Base class that keeps the abandoned writes of an engine.

    `advance` is a method and not a callback, because a stored bound method would be a reference cycle that delays the
    destruction of a closed transport.
    """

    def __init__(self) -> None:
        self._draining: list[W] = []
        self._drain_lock = threading.Lock()

    @abstractmethod
    def advance(self, write: W) -> bool:
        """Poll a write; return True when the engine has finished it, with any failure in the write's `error`."""

    def drain(self, write: W) -> bool:
        """Poll a write as `advance` does, and let `drain_on` poll it from now on until it is finished."""
        with self._drain_lock:
            if self.advance(write):
                return True
            if write not in self._draining:
                self._draining.append(write)
            return False

    def drain_on(self) -> None:
        """Poll all abandoned writes."""
        if self._draining:
            with self._drain_lock:
                self._draining = [write for write in self._draining if not self.advance(write)]
