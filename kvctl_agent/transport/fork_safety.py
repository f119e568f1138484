"""Keeps forked child processes from destroying the engines of their parent.

A child shares its parent's file descriptors but has none of its threads. If the child destroys an engine, even only
because its interpreter ends, the engine's connections are removed from the parent's epoll sets and shut down, and UCX
aborts the parent. A child therefore keeps every engine until the child's process ends.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

_engines: set[weakref.ref[Any]] = set()


def disown_in_children(engine: Any) -> None:
    """Prevents child processes that are forked from now on from running the destructor of `engine`."""
    _engines.add(weakref.ref(engine, _engines.discard))


def _keep_engines() -> None:
    for reference in list(_engines):
        if (engine := reference()) is not None:
            # A reference without an owner; all others are cleared when the interpreter ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


os.register_at_fork(after_in_child=_keep_engines)
