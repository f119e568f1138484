"""A hostile scheduler for the tests that let threads race."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def switching() -> Iterator[None]:
    """Lets the interpreter switch threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
