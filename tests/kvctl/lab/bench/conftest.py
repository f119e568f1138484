"""The engine that draws charts, which keeps threads and files open until this process ends."""

from __future__ import annotations

import pytest
import vl_convert


@pytest.fixture(scope="session")
def chart_engine() -> None:
    """Starts the engine before a test, so that the test does not leave it behind."""
    vl_convert.vegalite_to_svg({"data": {"values": []}, "mark": "point"})
