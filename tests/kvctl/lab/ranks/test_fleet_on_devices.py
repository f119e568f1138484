"""Whole fleets whose pools, staging and rings are on the stand-in device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvctl.lab.ranks import content, measure, resolve, sizing
from kvctl.lab.ranks.messages import Measure
from kvctl.lab.ranks.request import Sizes
from kvctl.lab.ranks.sizing import Budget
from tests.support.host_device import HostDevice

MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """The only one there is."""
    device = HostDevice(slow=2)
    monkeypatch.setattr(sizing, "count_gpus", lambda: 1)
    monkeypatch.setattr(resolve, "gpu_budget", lambda *args: Budget(192 * MIB, 64 * MIB, 256 * MIB))
    monkeypatch.setattr(content, "open_device", lambda index: device)
    return device


def succeeded(fleet: Any, path: str, **command: Any) -> dict[str, Any]:
    reports: dict[str, Any] = fleet.run(path, **command)
    assert all(report["failures"] == {} or report["failures"] == [] for report in reports.values()), reports
    for verdict in fleet.verify().values():
        assert verdict["mismatches"] == []
        assert verdict["rooms"] == 6
        assert verdict["bytes"] > 0
    return reports


@pytest.mark.parametrize("prefill", [Sizes(tp=2), Sizes(), Sizes(pp=2)])
def test_every_path_moves_what_verifies(fleet: Callable[..., Any], gpu: HostDevice, prefill: Sizes):
    whole = prefill.tp == 1
    started = fleet(device="cuda", prefill=(prefill,))
    for path in ("bulk" if whole else "slice", "staged", "direct", "auto"):
        before = len(gpu.begun)
        succeeded(started, path)
        if path in ("staged", "direct"):
            assert len(gpu.begun) > before


def test_layers_go_in_groups_too(fleet: Callable[..., Any]):
    started = fleet(device="cuda", prefill=(Sizes(tp=2),))
    for path in ("staged", "direct"):
        succeeded(started, path, pipeline="2", layer_ms=0.2)


def test_floors_of_a_device_are_measured(fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "device_gb_per_s", partial(measure.device_gb_per_s, nbytes=MIB))
    monkeypatch.setattr(measure, "peer_gb_per_s", partial(measure.peer_gb_per_s, nbytes=MIB))
    started = fleet(device="cuda")
    for kind in ("memcpy", "write", "device", "peer"):
        assert (started.ask("p0-prefill-0", Measure(kind))["gb_per_s"] or 0) > 0, kind
    succeeded(started, "staged")


def test_host_pools_have_no_floor_of_a_device(fleet: Callable[..., Any]):
    started = fleet()
    assert [started.ask("p0-prefill-0", Measure(kind)) for kind in ("device", "peer")] == [{"gb_per_s": None}] * 2
