"""Exporters of a worker: metrics for Prometheus, probes, and one OpenTelemetry span per room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl_agent.contract.addresses import Address, AddressError, parse_listening
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import ConfigError
from kvctl_agent.host.http_server import PageServer
from kvctl_agent.observer.fold import Fold
from kvctl_agent.observer.opentelemetry import RoomSpans
from kvctl_agent.observer.probes import Check, probe_page
from kvctl_agent.observer.prometheus import Families, metrics_page
from kvctl_agent.runtime.liveness import host_name

Checks = Callable[[], Sequence[Check]]


def check_exports(settings: Mapping[str, Any]) -> tuple[Address, ...]:
    """Returns the addresses of the metrics; none if they are not enabled.

    Raises:
        ConfigError: an address is invalid, or other machines can reach it and neither `metrics_public` nor `insecure`
            is set.
    """
    endpoint: str = settings["metrics_endpoint"]
    if not endpoint:
        return ()
    try:
        addresses = parse_listening(endpoint, numeric=True)
    except AddressError as error:
        raise ConfigError(f"metrics_endpoint = {error}") from None
    if not addresses[0].is_loopback and not (settings["metrics_public"] or settings["insecure"]):
        raise ConfigError(
            f"metrics_endpoint = {endpoint} can be reached from other machines over plain HTTP: use a "
            "loopback address behind a proxy, or set metrics_public"
        )
    return tuple(addresses)


class Exports:
    """Exporters that the configuration enables."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        name: str,
        role: Role,
        families: Families,
        fold: Fold,
        ready: Checks,
        alive: Checks,
        pid: int | str = "self",
    ) -> None:
        """Starts them.

        Args:
            families: returns the agent's current metrics.
            fold: source of the finished rooms.
            ready: returns the checks of the page `/readyz`.
            alive: returns the checks of the page `/livez`.
            pid: as for `metrics_page`.

        Raises:
            ConfigError: as `check_exports`, no port is free, or a package is not installed.
        """
        self._server: PageServer | None = None
        self._spans: RoomSpans | None = None
        if addresses := check_exports(settings):
            pages = {
                "/metrics": metrics_page(
                    {"agent": name, "role": role, "host": host_name(settings["host"])}, families, pid
                ),
                "/readyz": probe_page("readyz", ready),
                "/livez": probe_page("livez", alive, patient=True),
            }
            try:
                self._server = PageServer(addresses, pages, "kvctl-metrics")
            except OSError as error:
                text = f"cannot bind metrics_endpoint {settings['metrics_endpoint']}: {error.strerror}"
                raise ConfigError(text) from None
            self._server.start()
        if endpoint := settings["otel_endpoint"]:
            try:
                self._spans = RoomSpans(endpoint, name, role, fold)
                self._spans.start()
            except BaseException:
                self.close()
                raise

    @property
    def metrics_url(self) -> str:
        """URL that Prometheus scrapes; "" if the endpoint is not enabled or not started."""
        return f"{self._server.url}/metrics" if self._server is not None else ""

    @property
    def active(self) -> bool:
        """Whether an exporter runs."""
        return self._server is not None or self._spans is not None

    def close(self) -> None:
        """Stops the exporters; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._spans is not None:
            self._spans.close()
            self._spans = None
