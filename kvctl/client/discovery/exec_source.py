"""`exec:COMMAND`: a shell command that prints one endpoint per line, such as a query to a scheduler."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from typing import ClassVar

from kvctl.client.discovery import EXEC, listing, malformed
from kvctl.client.discovery.source import AgentSource, Found, SourceError
from kvctl.client.faults import FaultCode
from kvctl.client.keys import KeyNames

_READ_BYTES = 1 << 16
_MAX_ERROR_BYTES = 1 << 12
_SHOWN = 200


class CommandSource(AgentSource):
    """A shell command that prints one endpoint per line and exits with 0.

    It runs with /bin/sh in a session of its own, all of which is killed at the deadline, or when kvctl ends.
    """

    refresh_ns: ClassVar[int] = 10_000_000_000

    def __init__(self, url: str, keys: KeyNames) -> None:
        super().__init__(url, keys)
        self._command = url.removeprefix(EXEC).strip()
        if not self._command or "\0" in self._command:
            raise malformed(url)
        self._process: subprocess.Popen[bytes] | None = None
        self._interrupted = False
        self._lock = threading.Lock()

    def find(self, deadline_ns: int) -> Found:
        try:
            process = subprocess.Popen(
                ("/bin/sh", "-c", self._command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise SourceError(f"cannot be started: {error.strerror}") from None
        with process:
            try:
                with self._lock:
                    self._process = process
                    if self._interrupted:
                        self._kill()
                output, errors = _read(process, deadline_ns)
            except TimeoutError:
                text = "the command has not ended in time: raise --timeout, or make it faster"
                raise SourceError(text, FaultCode.TIMEOUT) from None
            finally:
                with self._lock:
                    self._kill()
                    self._process = None
            code = process.wait()
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            lines = errors.decode(errors="replace").strip().splitlines()
            raise SourceError(f"the command failed with {how}" + (f": {lines[-1]:.{_SHOWN}}" if lines else ""))
        return listing.parse(output, self.url)

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            self._kill()

    def _kill(self) -> None:
        """Kills the command and its children; it has not been reaped, so the number is not another process's."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _read(process: subprocess.Popen[bytes], deadline_ns: int) -> tuple[bytes, bytes]:
    """Returns what the process has written to stdout and stderr when it ends, without reaping it.

    Raises:
        TimeoutError: the deadline has passed.
        SourceError: the process has written more than MAX_BYTES to stdout.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = process.stdout.fileno(), process.stderr.fileno()
    content = {output: bytearray(), errors: bytearray()}
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*content, ended):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                left_ns = deadline_ns - time.monotonic_ns()
                if left_ns <= 0:
                    raise TimeoutError
                ready = {key.fd for key, _ in selector.select(left_ns / 1e9)}
                for descriptor in ready - {ended}:
                    data = os.read(descriptor, _READ_BYTES)
                    if not data:
                        selector.unregister(descriptor)
                    content[descriptor] += data
                if len(content[output]) > listing.MAX_BYTES:
                    text = f"the command printed more than {listing.MAX_BYTES >> 20} MiB"
                    raise SourceError(text, FaultCode.PROTOCOL)
                del content[errors][:-_MAX_ERROR_BYTES]
                if ready == {ended}:
                    break  # what it has left in the background may still hold its output open
    finally:
        os.close(ended)
    return bytes(content[output]), bytes(content[errors])
