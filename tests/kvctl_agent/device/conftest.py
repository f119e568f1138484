"""Fixture that replaces the CUDA driver by a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch  # noqa: F401  # Triton imports it, and half of it stays where a stand-in has taken the driver's place

from kvctl_agent.device import cuda
from kvctl_agent.device import driver as binding
from tests.kvctl_agent.device.fake_driver import FakeDriver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Replaces cuda-bindings' driver; the test's devices and mappings are separate from those of other tests."""
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(cuda, "_opened", {})
    binding.load.cache_clear()
    yield fake
    binding.load.cache_clear()
