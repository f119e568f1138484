"""A rank of a demo ends by itself: the demo says so when it happens, and not only at its end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.sample
def test_a_rank_that_ends_by_itself_is_named_at_once(demo: Callable[..., Any]) -> None:
    fleet = demo("--transport", "loopback", "--prefill-tp", "1", "--decode-dp", "1", "--rate", "2")
    fleet.said("serve after")
    (row,) = json.loads(fleet.kvctl("status", "-e", "decode-0", "-o", "json").stdout)["data"]
    os.kill(row["pid"], signal.SIGKILL)
    assert fleet.said("decode-0 ended with status -9: it printed nothing").endswith("; try kvctl doctor\n")
