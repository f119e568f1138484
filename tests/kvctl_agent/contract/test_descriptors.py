"""What is said where descriptors are short."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from kvctl_agent.contract.descriptors import shortage


@pytest.fixture
def limit() -> Iterator[int]:
    """This process may open ten more descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 10, before[1]))
    yield free + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_enough_is_nothing_to_tell_of(limit: int) -> None:
    assert shortage(5) is None


def test_too_few_are_counted_with_the_limit(limit: int) -> None:
    text = shortage(100)
    assert text is not None
    assert text.startswith("100 more file descriptors are needed and ")
    assert f"the limit is {limit} (ulimit -n)" in text
