"""Decides who may finish a CURVE handshake with the sockets of one ZMQ context (ZAP, RFC 27).

Without an answer libzmq would let every key in. The thread ends with `close`, which comes before the context's end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import zmq

_ENDPOINT = "inproc://zeromq.zap.01"
_FRAMES = 7  # version, request id, domain, address, identity, mechanism, public key


class ZapAuthenticator:
    """Answers libzmq's questions about the keys of clients.

    Messages of a client that was let in carry its public key as their `User-Id`, in hexadecimal digits.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        admits: Callable[[bytes], bool],
        refused: Callable[[str], None],
    ) -> None:
        """Serves at once.

        Args:
            context: whose sockets are guarded; made by the caller and ended by it, after `close`.
            name: of the thread.
            admits: whether the owner of a public key may come in; called on the thread of this gatekeeper.
            refused: told of each that may not, in words; called likewise.
        """
        self._admits = admits
        self._refused = refused
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ENDPOINT)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, at once, since it waits for nothing but us; idempotent."""
        if self._wake < 0:
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._wake = -1

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._wake not in (ready := dict(poller.poll())):
                if self._socket in ready:
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:  # the context went first
            pass
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request = frames[0], frames[1]
        key, address = frames[-1], frames[3].decode("ascii", "replace")
        try:
            admitted = len(frames) == _FRAMES and frames[5] == b"CURVE" and self._admits(key)
            reason = f"key {key.hex()} is not among those let in"
        except Exception as error:
            # Whatever went wrong, nobody comes in by it, and the next one is asked about again.
            admitted, reason = False, f"{type(error).__name__}: {error}"
        if admitted:
            return [version, request, b"200", b"OK", key.hex().encode(), b""]
        self._refused(f"refused a client at {address or 'ipc'}: {reason}")
        return [version, request, b"400", b"not let in", b"", b""]
