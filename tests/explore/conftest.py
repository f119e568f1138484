"""The explorer's configurations and mutations, each walked once for all tests here."""

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
    """What was found in a configuration. All are walked from the first question on, each once, on all processors."""
    from tests.explore.configurations import SMALL
    from tests.explore.explorer.search import Bounds
    from tests.explore.mutations import MUTATIONS

    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        worlds = dict.fromkeys([*SMALL, *(mutation.configuration for mutation in MUTATIONS)])
        runs = {world: pool.submit(world.explore, Bounds(BOUND)) for world in worlds}
        yield lambda world: runs[world].result()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The processes that explore outlive a test, which holds nothing itself."""
