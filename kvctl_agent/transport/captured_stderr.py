"""Captures stderr of an engine's C++ code, where it is the only place with the cause of a failure."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence

_capturing = threading.Lock()


@contextlib.contextmanager
def captured_stderr(less: Sequence[bytes] = (), quiet: bool = False) -> Iterator[bytearray]:
    """Capture what this process writes to stderr within the block, and write it to stderr at the end.

    Args:
        less: Lines that contain one of these strings are dropped.
        quiet: Write nothing to stderr at the end, for text that was written before.
    """
    captured = bytearray()
    with _capturing, tempfile.TemporaryFile() as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            for line in file:
                if not any(dropped in line for dropped in less):
                    captured += line
            if not quiet:
                os.write(2, captured)
