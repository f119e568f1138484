"""Pages that SGLang frees while they may be read come back to its allocator once, when the request has ended."""

from __future__ import annotations

import pytest
import torch

from kvctl_agent.integrations.sglang.deferred_free import DeferredFree


class Allocator:
    """What is used of SGLang's."""

    def __init__(self) -> None:
        self.freed: list[tuple[list[int], int]] = []

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.freed.append((free_index.tolist(), start_pos))


def test_pages_are_free_when_the_request_has_ended() -> None:
    allocator, deferred, table = Allocator(), DeferredFree(), torch.arange(8)
    with deferred.deferring(allocator):
        allocator.free_segment(table[2:4], start_pos=16)
        allocator.free_segment(table[:0], start_pos=0)
        table[:] = -1  # SGLang writes the pages in its cache there
    allocator.free_segment(torch.tensor([9]), start_pos=32)
    assert allocator.freed == [([9], 32)]
    with deferred.deferring(allocator):
        allocator.free_segment(torch.tensor([5]), start_pos=48)
    deferred.free()
    deferred.free()
    assert allocator.freed == [([9], 32), ([2, 3], 16), ([5], 48)]


def test_the_allocator_is_as_before_after_an_error() -> None:
    allocator, deferred = Allocator(), DeferredFree()
    with pytest.raises(ZeroDivisionError), deferred.deferring(allocator):
        raise ZeroDivisionError
    assert not {"free_segment"} & set(vars(allocator))
