"""Admin server of one worker on a thread of its own, with given handlers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvctl_agent.contract.snapshots import Hello
from kvctl_agent.errors import AdminError, DeadlineExceeded
from kvctl_agent.observer.endpoints import RemoteEndpoint
from kvctl_agent.observer.metrics import Metrics
from kvctl_agent.observer.server import AdminService, Handler, ServerLoop
from kvctl_agent.observer.socket_claim import Claim
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Counters


class AdminServer:
    """Admin server of one agent on a thread of its own.

    Arguments as for `AdminService`, and:

    Attributes:
        remote_address: TCP endpoint with its actual port, also after `close`; "" if there is no TCP endpoint.

    Args:
        directory: directory of the socket; None for `contract.admin.socket_dir()`.
        remote: TCP endpoint for clients with keys; None without one.
        endpoint: address under which the rank's peers know it, for the lock file; "" if they know its name.
    """

    def __init__(
        self,
        name: str,
        handlers: Mapping[str, Handler],
        hello: Callable[[], Hello],
        directory: Path | None = None,
        metrics: Counters | None = None,
        recorder: FlightRecorder | None = None,
        clock: Clock | None = None,
        remote: RemoteEndpoint | None = None,
        endpoint: str = "",
    ) -> None:
        clock = clock or Clock()
        recorder = recorder or FlightRecorder(clock, lambda entry: None)
        self._service = AdminService(name, handlers, hello, metrics or Metrics(), recorder, clock)
        self._claim = partial(Claim, name, directory, endpoint)
        self._remote = remote
        self.remote_address = ""
        self._loop: ServerLoop | None = None
        self._thread: threading.Thread | None = None
        self.add = self._service.add

    @property
    def client(self) -> str:
        """Origin of the request being answered, as in `ClientRequest.origin`."""
        return self._service.client

    @property
    def path(self) -> Path | None:
        """Path of the Unix socket while it is served."""
        return self._service.path

    def start(self) -> AdminServer:
        """Claims the agent's name, binds the sockets and starts the thread.

        Raises:
            AdminError: another agent has the name, or a socket cannot be bound.
        """
        service = self._service
        if self._thread is not None:
            raise AdminError(f"the admin server of {service.name} was started before")
        with contextlib.ExitStack() as resources:
            claim = self._claim()
            resources.callback(claim.release)
            claim.path.unlink(missing_ok=True)
            resources.callback(service.close)
            service.bind(claim.path)
            if self._remote is not None:
                service.bind_remote(self._remote)
                self.remote_address = service.remote_address
            loop = ServerLoop()
            resources.callback(loop.close)
            loop.add(service)
            owned = resources.pop_all()
        thread = threading.Thread(target=_serve, args=(loop, owned), name=f"kvctl-admin-{service.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the process may have no more threads
            owned.close()
            raise
        self._loop, self._thread = loop, thread
        return self

    def close(self, timeout: float = 2.0) -> None:
        """Stops the thread, removes the socket and releases the agent's name. Idempotent.

        Raises:
            DeadlineExceeded: a handler is still running after `timeout` seconds; when it ends, the thread ends and
                releases socket and name.
        """
        if self._thread is None or self._loop is None:
            return
        self._loop.stop()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the admin server of {self._service.name} did not stop within {timeout:g} s")

    def __enter__(self) -> AdminServer:
        return self.start() if self._thread is None else self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(loop: ServerLoop, resources: contextlib.ExitStack) -> None:
    with resources:
        loop.run()
