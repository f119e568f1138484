"""Error texts for missing file descriptors."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl_agent.contract.sockets import shortage


@pytest.fixture
def limit() -> Iterator[int]:
    """Limits this process to about ten more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 11
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_enough_is_nothing_to_tell_of(limit: int) -> None:
    assert shortage(5) is None


def test_too_few_are_counted_with_the_limit(limit: int) -> None:
    text = shortage(10_000)
    assert text is not None
    assert text.startswith("10000 more file descriptors are needed and ")
    assert f"the limit is {limit} (ulimit -n)" in text
