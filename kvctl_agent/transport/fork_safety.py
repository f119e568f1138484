"""What becomes of engines in a process that was forked off: nothing, for ever.

The child shares its parent's descriptors but has none of its threads. An engine that the child destroys, be it only
because its interpreter ends, takes its connections out of the parent's epoll sets and shuts them down: UCX then aborts
the parent. So a child holds on to every engine until it is gone itself.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

_engines: set[weakref.ref[Any]] = set()


def disown_in_children(engine: Any) -> None:
    """From now on no forked child runs the destructor of this engine."""
    _engines.add(weakref.ref(engine, _engines.discard))


def _hold_on() -> None:
    for reference in list(_engines):
        if (engine := reference()) is not None:
            # A reference that nobody owns: the interpreter's end clears all others.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


os.register_at_fork(after_in_child=_hold_on)
