"""Workloads, fleets, results: what stands between the `bench` command and the rig processes it drives."""

from __future__ import annotations
