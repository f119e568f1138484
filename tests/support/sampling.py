"""Cases of which `make test` runs some and `make test-all` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], of: int) -> list[Any]:
    """Returns parameters named as the cases, of which the first and every `of`th are in the sample."""
    marks = pytest.mark.sample
    return [pytest.param(case, id=case.name, marks=() if n % of else marks) for n, case in enumerate(cases)]
