"""Walks the explorer's configurations once each, for all tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

BOUND = 200_000  # states of one configuration; none comes near it


@pytest.fixture(scope="session")
def explored(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Returns the result of a configuration. The first call begins the walks that the chosen tests will ask for.

    They have a core to themselves; beside other workers of `make test`, one for all of them.
    """
    from tests.explore.configurations import SMALL
    from tests.explore.explorer.search import Bounds

    processes = 1 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count()
    worlds: dict[Any, None] = {}
    for item in request.session.items:
        if "explored" in getattr(item, "fixturenames", ()):
            values = item.callspec.params.values() if hasattr(item, "callspec") else SMALL
            worlds.update(dict.fromkeys(getattr(value, "configuration", value) for value in values))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        runs = {world: pool.submit(world.explore, Bounds(BOUND)) for world in worlds}
        yield lambda world: runs[world].result()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Override: the exploring processes outlive a test."""
