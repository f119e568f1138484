"""What `-l role=decode,tp=0` can ask for; apart from the sockets, because reading the command line needs only this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LABELS = ("role", "dp", "pp", "cp", "tp", "unique", "name", "version", "device")


def matches(labels: Mapping[str, str], status: Mapping[str, Any]) -> bool:
    """Whether an agent's status carries all the labels."""
    carried = {key: str(value) for key, value in status["rank"].items()}
    carried |= {key: str(status[key]) for key in ("name", "role", "version", "device")}
    return all(carried.get(key) == value for key, value in labels.items())
