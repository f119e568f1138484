"""Content on a real GPU: what stand-ins cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvctl.lab.ranks.content import Content, allocate_pool
from kvctl.lab.ranks.measure import device_gb_per_s
from kvctl.lab.ranks.messages import Room
from kvctl.lab.ranks.plan import PlannedShape
from kvctl.lab.ranks.verify import verify
from kvctl_agent.device.cuda import open_device
from kvctl_agent.errors import DeviceUnavailable
from tests.support.synthetic_rank import SHAPE as BASE
from tests.support.synthetic_rank import start_command

SHAPE: PlannedShape = {
    **BASE,
    "layers": 5,
    "kv_heads": 8,
    "head_dim": 128,
    "v_head_dim": 72,
    "k_scale_bytes": 4,
    "states": [{"name": "odd", "layers": [1, 4], "rows": 3, "heads": 2, "head_bytes": 7, "kind": "pages", "window": 0}],
}


@pytest.fixture
def no_leaks() -> None:
    """The driver opens descriptors as it needs them, and keeps them."""


@pytest.fixture
def gpu(no_leaks: None) -> Any:
    try:
        return open_device(0)
    except DeviceUnavailable:
        pytest.skip("no NVIDIA GPU here (run benchmarks/gpu.sh on one)")


@pytest.fixture
def content(gpu: Any) -> Iterator[Content]:
    slots = {"pool_pages": 800, "state_slots": {"odd": 800}, "aux_slots": 4}
    start = start_command(SHAPE, page_size=16, device=0, **slots)
    pool = allocate_pool(start)
    content = Content(pool, start)
    content.take([Room(at, 100 + at, tokens, 32, 0, at) for at, tokens in enumerate((4096, 1000, 5000))])
    content.poison()
    yield content
    pool.close()


def receive(content: Content) -> None:
    """Everything, but for the cached prefix."""
    content.fill(0)
    for deck in (deck for deck in content.views if not deck.shard.segment.state):
        for number in content.rooms:
            content.store.poison(deck, content.pages(number)[:2])


def test_content_is_written_and_checked(content: Content, gpu: Any):
    receive(content)
    assert verify(content, "full")["mismatches"] == verify(content, "sample")["mismatches"] == []
    for deck in content.views:
        _, base = list(deck.addresses())[-1]
        page = int(content.items[101][deck.shard.segment.index][-1])
        for where in (page, 0):
            addr = base + where * deck.rows.page_bytes + deck.rows.page_bytes // 2
            byte = np.zeros(1, np.uint8)
            gpu.download(addr, byte)
            gpu.upload(addr, byte ^ 4)
    found = verify(content, "full")
    assert found["bad_rooms"] == [1]
    assert [each["room"] for each in found["mismatches"]].count(0) == len(content.views)


def test_a_gpu_copies_as_fast_as_gpus_do(gpu: Any):
    assert device_gb_per_s(gpu) > 100
