"""Stand-ins for vLLM 0.32 while the tests of a module run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.vllm.modules import installed, versions


@pytest.fixture(scope="module", autouse=True)
def vllm() -> Iterator[None]:
    with installed(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(versions, "version", lambda name: "0.32.0")
        yield
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
