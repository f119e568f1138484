"""Engines that are observed without an agent, by the metrics that they export for Prometheus.

`names` has the metrics of each engine that kvctl reads, `scrape` gets them over HTTP, and `reader` answers with them as
an agent answers to `hello`, `status` and `metrics`.
"""
