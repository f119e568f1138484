"""Puts the explorer, and the simulated world that it starts from, within reach of the tests here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "kvctl_agent" / "protocol")]

BOUND = 200_000  # states of one configuration; none comes near it


@pytest.fixture(scope="session")
def explored() -> Iterator[Callable[[Any], Any]]:
    """What was found in a configuration. All are walked from the first question on, each once, on all processors."""
    from configurations import SMALL
    from explorer.search import Bounds
    from mutations import MUTATIONS

    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        worlds = dict.fromkeys([*SMALL, *(mutation.configuration for mutation in MUTATIONS)])
        runs = {world: pool.submit(world.explore, Bounds(BOUND)) for world in worlds}
        yield lambda world: runs[world].result()


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The processes that explore outlive a test, which holds nothing itself."""
