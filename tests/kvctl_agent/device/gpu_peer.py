"""A second process for tests on a GPU: maps the memory that the first one exported and writes rows into it with the
copy kernel.

JSON on stdin, JSON on stdout: the interconnect, or the reason for a refusal.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from kvctl_agent.device.base import Batch, Export
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceError
from tests.kvctl_agent.device.geometries import of_rows

DEADLINE_S = 60.0


def content(rows: int, width: int) -> np.ndarray:
    """The written bytes; row i goes to the i-th requested page."""
    return np.random.default_rng(rows).integers(0, 256, (rows, width), np.uint8)


def serve(device: int, exports: list[list[Any]], target: int, width: int, pages: list[int]) -> str:
    """Writes one row into each of the pages at the exporter's address `target`.

    Returns:
        The interconnect.
    """
    gpu = open_device(device)
    given = [Export(addr, nbytes, kind, bytes.fromhex(handle), name) for addr, nbytes, kind, handle, name in exports]
    # Two lanes, one of which ends early.
    mapping, other = gpu.open(given), gpu.open(given)
    assert mapping.translate(target) == other.translate(target)
    other.close()
    rows = content(len(pages), width)
    source = gpu.allocate(rows.nbytes)
    gpu.upload(source.addr, rows)
    count = len(pages)
    listed = np.array([*range(count), *pages], np.int32)
    into = int(mapping.translate_all(np.array([target], np.int64))[0])
    block = np.array([[source.addr, into, 0, count, count]], np.int64)
    copies = gpu.copies()
    done = copies.begin([Batch(of_rows(1, width, width, width, True, True), block)], listed)
    until = time.monotonic() + DEADLINE_S
    while not done.done():
        assert time.monotonic() < until, "the copy does not end"
    copies.close()
    mapping.close()
    source.close()
    return mapping.lane


if __name__ == "__main__":
    try:
        answer = {"lane": serve(**json.load(sys.stdin))}
    except DeviceError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
