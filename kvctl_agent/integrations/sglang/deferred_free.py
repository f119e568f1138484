"""Defers the freeing of a request's pages that SGLang frees while they may still be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DeferredFree:
    """Pages that SGLang has freed and its allocator gets back when they are not read any more.

    SGLang frees a request's own pages when its cache has the same tokens in other pages, from another request. With
    layer groups they may have been passed to the agent by then. All ranks of a server must defer and free alike, since
    their schedulers take decisions by the number of free pages.
    """

    def __init__(self) -> None:
        self._deferred: list[tuple[Any, Any, int]] = []  # allocator, token slots, and position in the prompt

    @contextmanager
    def deferring(self, allocator: Any) -> Iterator[None]:
        """Defers what is freed inside the context by `free_segment` of one of SGLang's allocators."""

        def defer(free_index: Any, *, start_pos: int) -> None:
            if len(free_index):  # a view of a table that SGLang writes to next
                self._deferred.append((allocator, free_index.clone(), start_pos))

        allocator.free_segment = defer
        try:
            yield
        finally:
            del allocator.free_segment

    def free(self) -> None:
        """Frees the pages."""
        deferred, self._deferred = self._deferred, []
        for allocator, slots, start in deferred:
            allocator.free_segment(slots, start_pos=start)
