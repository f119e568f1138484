"""Exporters of an agent: metrics for Prometheus, and one OpenTelemetry span per room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import ConfigError
from kvctl_agent.export.opentelemetry import RoomSpans
from kvctl_agent.export.prometheus import Address, Families, PrometheusEndpoint
from kvctl_agent.telemetry.hub import Telemetry


class Exports:
    """Exporters that the configuration enables; the constructor checks the configuration, `start` starts the exporters.

    Raises:
        ConfigError: an address is invalid, or other machines can reach it and `insecure` is not set.
    """

    def __init__(self, settings: Mapping[str, Any], name: str, role: Role) -> None:
        self._labels = {"agent": name, "role": role}
        self._role: Role = role
        self._spans_to: str = settings["otel_endpoint"]
        self._address = Address(text) if (text := settings["metrics_endpoint"]) else None
        if self._address is not None and not self._address.local and not settings["insecure"]:
            raise ConfigError(
                f"metrics_endpoint = {text} can be reached from other machines over plain HTTP: use a loopback address "
                "behind a proxy, or set insecure"
            )
        self._endpoint: PrometheusEndpoint | None = None
        self._spans: RoomSpans | None = None

    @property
    def metrics_url(self) -> str:
        """URL that Prometheus scrapes; "" if the endpoint is not enabled or not started."""
        return self._endpoint.url if self._endpoint is not None else ""

    def start(self, families: Families, telemetry: Telemetry) -> None:
        """Starts the configured exporters.

        Args:
            families: returns the agent's current metrics.
            telemetry: source of the finished rooms.

        Raises:
            ConfigError: no port is free, or a package is not installed.
        """
        if self._address is not None:
            self._endpoint = PrometheusEndpoint(self._address, self._labels, families)
            self._endpoint.start()
        if self._spans_to:
            self._spans = RoomSpans(self._spans_to, self._labels["agent"], self._role, telemetry)
            self._spans.start()

    def close(self) -> None:
        """Stops the exporters; idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
        if self._spans is not None:
            self._spans.close()
            self._spans = None
