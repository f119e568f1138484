"""`kvctl check --http`: serves the result of the checks over HTTP, for probes and load balancers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import NamedTuple

from kvctl.errors import CliError
from kvctl.exit_codes import CheckState, ExitCode
from kvctl_agent.contract.addresses import Address, AddressError, parse_listening
from kvctl_agent.host.http_server import Answer, Page, PageServer

_KEPT_S = 1.0
_JSON = "application/json"
# A warning must not take an instance out of service.
_STATUS = {
    CheckState.OK: HTTPStatus.OK,
    CheckState.WARNING: HTTPStatus.OK,
    CheckState.CRITICAL: HTTPStatus.SERVICE_UNAVAILABLE,
    CheckState.UNKNOWN: HTTPStatus.SERVICE_UNAVAILABLE,
}


class CheckResult(NamedTuple):
    """Result of one check: its state, and its output as text and as JSON."""

    state: CheckState
    text: str
    json: str


class SharedChecks:
    """Carries out the checks for all clients, one check at a time and at most once a second.

    Args:
        check: carries out the checks, on a thread of the server.
    """

    def __init__(self, check: Callable[[], CheckResult]) -> None:
        self._check = check
        self._checking = threading.Lock()
        self._result: CheckResult | None = None
        self._until_s = 0.0

    def result(self) -> CheckResult:
        """Returns a result that is at most a second older than the call."""
        with self._checking:
            if self._result is None or time.monotonic() >= self._until_s:
                self._result = self._check()
                self._until_s = time.monotonic() + _KEPT_S
            return self._result

    def pages(self) -> dict[str, Page]:
        """Returns the pages: `/` is text, or JSON if the client accepts only that; `/json` is JSON."""
        return {
            "/": lambda accept: self._json if accept.startswith(_JSON) else self._text,
            "/json": lambda _: self._json,
        }

    def _json(self) -> Answer:
        result = self.result()
        return Answer(_STATUS[result.state], result.json.encode(), _JSON)

    def _text(self) -> Answer:
        result = self.result()
        return Answer(_STATUS[result.state], result.text.encode())


def addresses_of(text: str, public: bool) -> tuple[Address, ...]:
    """Returns the addresses to listen on, the first free one; raises CliError if they are not loopback or `public`."""
    try:
        addresses = parse_listening(text, numeric=True)
    except AddressError as error:
        raise CliError(f"--http: {error}", ExitCode.USAGE) from None
    if not addresses[0].is_loopback and not public:
        raise CliError(
            f"--http {text}: other machines can reach this address, over plain HTTP: add --public on a network that "
            "you trust",
            ExitCode.USAGE,
        )
    return addresses


def serve(addresses: Sequence[Address], checks: SharedChecks, started: Callable[[str], None]) -> None:
    """Serves the pages until Ctrl-C.

    Args:
        started: called with the URL once the server listens.

    Raises:
        CliError: the address cannot be bound.
    """
    try:
        server = PageServer(addresses, checks.pages(), "kvctl-check")
    except OSError as error:
        raise CliError(f"--http {addresses[0].place}: {error.strerror}", ExitCode.FAILED) from None
    server.start()
    started(server.url)
    try:
        threading.Event().wait()
    finally:
        server.close()
