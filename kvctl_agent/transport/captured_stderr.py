"""What an engine's C++ half writes to stderr, where that is the only place that says why something failed."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence

_listening = threading.Lock()


@contextlib.contextmanager
def captured_stderr(less: Sequence[bytes] = (), quiet: bool = False) -> Iterator[bytearray]:
    """Keeps what this process writes to stderr meanwhile; passes it on at the end.

    Args:
        less: lines with any of these in them are dropped.
        quiet: pass nothing on: it was said before.
    """
    said = bytearray()
    with _listening, tempfile.TemporaryFile() as heard:
        stderr = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield said
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            heard.seek(0)
            for line in heard:
                if not any(alarm in line for alarm in less):
                    said += line
            if not quiet:
                os.write(2, said)
