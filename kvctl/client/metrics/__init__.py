"""Engines that are observed without an agent, by the metrics that they export for Prometheus."""
