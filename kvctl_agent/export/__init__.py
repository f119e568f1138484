"""Exporters of an agent: metrics for Prometheus, probes, and one OpenTelemetry span per room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl_agent.contract.addresses import AddressError, parse_listening
from kvctl_agent.contract.http_server import PageServer
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import ConfigError
from kvctl_agent.export.opentelemetry import RoomSpans
from kvctl_agent.export.probes import Check, probe_page
from kvctl_agent.export.prometheus import Families, metrics_page
from kvctl_agent.runtime.liveness import host_name
from kvctl_agent.telemetry.hub import Telemetry

Checks = Callable[[], Sequence[Check]]


class Exports:
    """Exporters that the configuration enables; the constructor checks the configuration, `start` starts the exporters.

    Raises:
        ConfigError: an address is invalid, or other machines can reach it and neither `metrics_public` nor `insecure`
            is set.
    """

    def __init__(self, settings: Mapping[str, Any], name: str, role: Role) -> None:
        self._labels = {"agent": name, "role": role, "host": host_name(settings["host"])}
        self._role: Role = role
        self._spans_to: str = settings["otel_endpoint"]
        self._endpoint: str = settings["metrics_endpoint"]
        try:
            self._addresses = parse_listening(self._endpoint, numeric=True) if self._endpoint else ()
        except AddressError as error:
            raise ConfigError(f"metrics_endpoint = {error}") from None
        public = settings["metrics_public"] or settings["insecure"]
        if self._addresses and not self._addresses[0].is_loopback and not public:
            raise ConfigError(
                f"metrics_endpoint = {self._endpoint} can be reached from other machines over plain HTTP: use a "
                "loopback address behind a proxy, or set metrics_public"
            )
        self._server: PageServer | None = None
        self._spans: RoomSpans | None = None

    @property
    def metrics_url(self) -> str:
        """URL that Prometheus scrapes; "" if the endpoint is not enabled or not started."""
        return f"{self._server.url}/metrics" if self._server is not None else ""

    def start(self, families: Families, telemetry: Telemetry, ready: Checks, alive: Checks) -> None:
        """Starts the configured exporters.

        Args:
            families: returns the agent's current metrics.
            telemetry: source of the finished rooms.
            ready: returns the checks of the page `/readyz`.
            alive: returns the checks of the page `/livez`.

        Raises:
            ConfigError: no port is free, or a package is not installed.
        """
        if self._addresses:
            pages = {
                "/metrics": metrics_page(self._labels, families),
                "/readyz": probe_page("readyz", ready),
                "/livez": probe_page("livez", alive),
            }
            try:
                self._server = PageServer(self._addresses, pages, "kvctl-metrics")
            except OSError as error:
                text = f"cannot bind metrics_endpoint {self._endpoint}: {error.strerror}"
                raise ConfigError(text) from None
            self._server.start()
        if self._spans_to:
            self._spans = RoomSpans(self._spans_to, self._labels["agent"], self._role, telemetry)
            self._spans.start()

    def close(self) -> None:
        """Stops the exporters; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._spans is not None:
            self._spans.close()
            self._spans = None
