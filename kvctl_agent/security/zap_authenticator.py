"""ZAP authenticator (ZeroMQ RFC 27): decides which CURVE clients may connect to the sockets of one ZMQ context.

Without an authenticator libzmq accepts every key. Call `close` before the context is terminated.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import zmq

_ENDPOINT = "inproc://zeromq.zap.01"
_FRAMES = 7  # version, request id, domain, address, identity, mechanism, public key


class ZapAuthenticator:
    """Thread that answers libzmq's authentication requests.

    Messages of an accepted client have its public key, in hexadecimal digits, as their `User-Id`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        admits: Callable[[bytes], bool],
        refused: Callable[[str], None],
    ) -> None:
        """Starts the thread.

        Args:
            context: context of the sockets to protect; the caller terminates it after `close`.
            name: name of the thread.
            admits: returns whether a public key is accepted; runs on the authenticator's thread.
            refused: called with a description of each refused client, on the authenticator's thread.
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
        """Stops the thread; idempotent."""
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
        except zmq.ContextTerminated:  # the context was terminated before `close`
            pass
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request = frames[0], frames[1]
        key, address = frames[-1], frames[3].decode("ascii", "replace")
        try:
            admitted = len(frames) == _FRAMES and frames[5] == b"CURVE" and self._admits(key)
            reason = f"key {key.hex()} is not permitted"
        except Exception as error:
            # An error refuses this client; later requests are answered as usual.
            admitted, reason = False, f"{type(error).__name__}: {error}"
        if admitted:
            return [version, request, b"200", b"OK", key.hex().encode(), b""]
        self._refused(f"refused a client at {address or 'ipc'}: {reason}")
        return [version, request, b"400", b"not permitted", b"", b""]
