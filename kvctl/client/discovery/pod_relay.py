"""Port-forwarding through the Kubernetes API, for pods whose network cannot be reached: a local TCP port per agent.

The API server speaks WebSocket: one connection per forwarded connection, of which each frame begins with its channel, 0
for data and 1 for an error text of the node. The first frame of each channel holds the port. The local port carries
connections of this user only, where the system tells whose they are; besides, agents ask every client for a key.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from kvctl.client.discovery.source import SourceError
from kvctl.client.faults import FaultCode

if TYPE_CHECKING:
    from kubernetes.client import Configuration

_PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_READ_BYTES = 1 << 16
_SHOWN = 300
_RECONNECT_S = 5.0


class PodStream:
    """One forwarded connection to a port of a pod; one thread may send while another receives.

    Args:
        timeout_s: longest time until the port answers.

    Raises:
        SourceError: the API server refuses, or nothing listens on the port, or it sends nothing in time.
    """

    def __init__(self, configuration: Configuration, namespace: str, pod: str, port: int, timeout_s: float) -> None:
        import websocket

        deadline_s = time.monotonic() + timeout_s
        where = f"api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/portforward?{urlencode({'ports': port})}"
        url = f"{configuration.host.rstrip('/')}/{where}".replace("http", "ws", 1)
        self._started: set[int] = set()
        self._first = b""
        self._closed: type[Exception] = websocket.WebSocketException
        self._socket: Any
        try:
            self._socket = websocket.create_connection(
                url, timeout=timeout_s, subprotocols=[_PROTOCOL], **_options(configuration)
            )
        except websocket.WebSocketBadStatusException as error:
            raise _refusal(error.status_code, error.resp_body, namespace, pod) from None
        except (websocket.WebSocketException, OSError) as error:
            raise SourceError(f"port-forward to pod {pod}: {error}") from None
        try:
            # An agent's endpoint speaks first, so a port that is silent is not one.
            self._socket.settimeout(max(0.05, deadline_s - time.monotonic()))
            self._first = self._receive()
            self._socket.settimeout(None)
        except websocket.WebSocketTimeoutException:
            self.close()
            raise SourceError(f"pod {pod}: port {port} is silent: it is no admin_endpoint", FaultCode.TIMEOUT) from None
        except (websocket.WebSocketException, OSError, ConnectionError) as error:
            self.close()
            raise SourceError(f"pod {pod}: port {port}: {error or 'the connection was closed'}") from None

    def receive(self) -> bytes:
        """Returns data from the pod; b"" at the end of the connection."""
        if self._first:
            data, self._first = self._first, b""
            return data
        try:
            return self._receive()
        except (self._closed, OSError):
            return b""

    def _receive(self) -> bytes:
        """Returns data from the pod.

        Raises:
            ConnectionError: the node reports an error, or the connection was closed.
            OSError, WebSocketException: the connection failed.
        """
        while True:
            frame = self._socket.recv()
            if not isinstance(frame, bytes) or not frame:
                raise ConnectionError("the connection was closed")
            channel, data = frame[0], frame[1:]
            if channel not in self._started:
                self._started.add(channel)
            elif channel == _ERROR and data:
                raise ConnectionError(data.decode(errors="replace").strip()[:_SHOWN])
            elif channel == _DATA and data:
                return data

    def send(self, data: bytes) -> None:
        """Sends data to the pod; raises OSError if the connection has ended."""
        try:
            self._socket.send_binary(bytes((_DATA,)) + data)
        except self._closed as error:
            raise OSError(str(error)) from None

    def close(self) -> None:
        """Ends the connection, and with it a `receive` of another thread; idempotent."""
        with contextlib.suppress(Exception):  # it may have ended in any way
            self._socket.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):
            self._socket.shutdown()


def _options(configuration: Configuration) -> dict[str, Any]:
    """Returns the options of `websocket.create_connection` for authentication, TLS and proxies."""
    settings: Any = configuration.auth_settings()
    headers = [
        f"{auth['key']}: {auth['value']}" for auth in settings.values() if auth["in"] == "header" and auth["value"]
    ]
    tls: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE, "check_hostname": False}
    if configuration.verify_ssl:
        tls = {"cert_reqs": ssl.CERT_REQUIRED, "check_hostname": configuration.assert_hostname is not False}
        if configuration.ssl_ca_cert:
            tls["ca_certs"] = configuration.ssl_ca_cert
    if configuration.cert_file:
        tls |= {"certfile": configuration.cert_file, "keyfile": configuration.key_file}
    if configuration.tls_server_name:
        tls["server_hostname"] = configuration.tls_server_name
    options: dict[str, Any] = {"header": headers, "sslopt": tls}
    if configuration.proxy:
        proxy = urlsplit(configuration.proxy)
        options |= {"http_proxy_host": proxy.hostname, "http_proxy_port": proxy.port, "proxy_type": "http"}
    return options


def _refusal(status: int, body: bytes | None, namespace: str, pod: str) -> SourceError:
    if status in (401, 403):
        text = (
            f"port-forward to pod {pod}: not permitted; may it be done: "
            f"kubectl auth can-i get pods/portforward -n {namespace}"
        )
        return SourceError(text, FaultCode.NOT_PERMITTED)
    reason = (body or b"").decode(errors="replace").strip()[:_SHOWN]
    return SourceError(f"port-forward to pod {pod}: HTTP {status}" + (f": {reason}" if reason else ""))


class Relay:
    """Local TCP port whose connections, one at a time, are forwarded to a port of a pod.

    Args:
        connect: opens a connection to the pod within the given seconds.
        timeout_s: longest time until the first connection is open.

    Raises:
        SourceError: the first connection cannot be opened.

    Attributes:
        address: `tcp://127.0.0.1:PORT`.
        failed: whether a later connection could not be opened.
    """

    def __init__(self, connect: Callable[[float], PodStream], timeout_s: float) -> None:
        self._connect = connect
        self._open: PodStream | None = connect(timeout_s)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.failed = False
        self._local: socket.socket | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvctl-port-forward", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the port and the connection."""
        self._closing = True
        for each in (self._listener, self._local):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        if self._open is not None:
            self._open.close()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._local, (_, port) = self._listener.accept()
            except OSError:
                return
            with self._local:
                if not _is_own(port, self._listener.getsockname()[1]):
                    continue
                try:
                    self._open = self._open or self._connect(_RECONNECT_S)
                except SourceError:
                    self.failed = True
                    continue
                if not self._closing:
                    _carry(self._local, self._open)
            self._open = None


def _is_own(client: int, server: int) -> bool:
    """Returns whether the client of a connection within this host, given by its ports, is of this user or of root.

    True also where the system does not tell.
    """
    ports = [f"{client:04X}", f"{server:04X}"]
    try:
        connections = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
    except OSError:  # not Linux
        return True
    for line in connections:
        _, local, remote, _, _, _, _, user, *_ = line.split()
        if [local.rpartition(":")[2], remote.rpartition(":")[2]] == ports:
            return int(user) in (os.geteuid(), 0)
    return False  # it has closed the connection


def _carry(local: socket.socket, stream: PodStream) -> None:
    """Carries data both ways until one side ends; closes the stream."""

    def downwards() -> None:
        with contextlib.suppress(OSError):
            while data := stream.receive():
                local.sendall(data)
        with contextlib.suppress(OSError):
            local.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=downwards, name="kvctl-port-forward-in", daemon=True)
    thread.start()
    with contextlib.suppress(OSError):
        while data := local.recv(_READ_BYTES):
            stream.send(data)
    stream.close()
    thread.join()
