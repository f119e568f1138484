"""SGLang's classes in rank processes: one process imports SGLang for all tests here and forks their ranks."""

import pytest

from tests.support.sglang import pair


@pytest.fixture(scope="session", autouse=True)
def sglang_process() -> None:
    """Starts that process before the checks for leaks of a test look for the first time."""
    if not pair.installed():
        pytest.skip("SGLang's classes are not installed: make .venv/sglang/.done")
    pair.forker()
