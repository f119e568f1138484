"""Walks the explorer's configurations and mutations once each, for all tests in this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

BOUND = 200_000  # states of one configuration; none comes near it


@pytest.fixture(scope="session")
def explored() -> Iterator[Callable[[Any], Any]]:
    """Returns the result of a configuration. The first call begins the walks of all configurations on all cores."""
    from tests.explore.configurations import SMALL
    from tests.explore.explorer.search import Bounds
    from tests.explore.mutations import MUTATIONS

    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        worlds = dict.fromkeys([*SMALL, *(mutation.configuration for mutation in MUTATIONS)])
        runs = {world: pool.submit(world.explore, Bounds(BOUND)) for world in worlds}
        yield lambda world: runs[world].result()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Override: the exploring processes outlive a test."""
