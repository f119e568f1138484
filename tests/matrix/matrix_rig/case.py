"""The input of a run: two layouts, a model, and the transfer of its rooms."""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.layout.parallel import ParallelConfig


class Case(NamedTuple):
    """One run.

    Attributes:
        prefill: the prefill instances; rooms take turns.
        path, staging, cp_mode, chunk_tokens, copy_threads, early_send: the agents' configuration.
        grouped: prefill sends layer groups while it computes.
        prefix: pages that decode has cached: "none", "some" (whole pages of some rooms), "all" (all of one room).
    """

    name: str
    transport: str
    model: str
    prefill: tuple[ParallelConfig, ...]
    decode: ParallelConfig
    path: str = "staged"
    grouped: bool = False
    page_size: int = 16
    prefix: str = "none"
    cp_mode: str = "rank0"
    chunk_tokens: int = 8192
    page_order: str = "random"
    staging: str = "auto"
    copy_threads: int = 0
    early_send: bool = True
