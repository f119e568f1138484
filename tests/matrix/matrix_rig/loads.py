"""The rooms of a case, and the start parameters of each of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvctl.lab.ranks.geometry import state_items
from kvctl.lab.ranks.messages import Room, Start
from kvctl.lab.ranks.request import Role, Sizes
from kvctl_agent.layout.chunks import page_count
from kvctl_agent.layout.parallel import ParallelConfig
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.models import MODELS

# Of all rooms at once. Some prompts end inside a page of 16; the second is whole pages of 64, so that decode may have
# cached all of it. The last is of a request that decode does not need: prefill alone answers it.
TOKENS = (190, 128, 21, 50)
PREFILL_ONLY = 3
_SPARE = 3  # pages, items and aux rows that no room has, where nothing may land
RING_MIB = 1
_CONFIG: dict[str, str | int | float | bool] = {
    "staging_buffer_mb": 1,
    "staging_ring_mb": RING_MIB,
    # All ranks of a side share one core, and others may have it: silence means little here.
    "suspect_s": 10.0,
    "lost_s": 30.0,
    "history_rooms": 8,
    "failed_rooms": 8,
    "timeline_events": 64,
    "recorder_events": 64,
}


def rooms_of(case: Case) -> list[Room]:
    """Several concurrent rooms, from all prefill instances to all decode dp groups."""
    page, first = case.page_size, hash_of(case.name)
    few, most = 16 // page * page, 70 // page * page
    cached = {"none": (0, 0, 0), "some": (most, 0, few), "all": (0, 128, few)}[case.prefix]
    # As far as its pages go, nothing of the last one is to come.
    prefixes = (*cached, page_count(TOKENS[PREFILL_ONLY], page) * page)
    return [
        Room(
            index,
            first + index,
            tokens,
            prefix,
            decode_dp=index % case.decode.dp,
            instance=index % len(case.prefill),
        )
        for index, (tokens, prefix) in enumerate(zip(TOKENS, prefixes, strict=True))
    ]


def starts_of(case: Case, role: Role, directory: Path) -> Iterator[Start]:
    """Starts parameters of each rank of a role."""
    shape = MODELS[case.model]
    config = _CONFIG | {
        "transport": case.transport,
        "path": case.path,
        "staging": case.staging,
        "chunk_tokens": case.chunk_tokens,
        "copy_threads": case.copy_threads,
        "pp_early_send": case.early_send,
    }
    if role == "prefill":
        config["cp_mode"] = case.cp_mode
    slots = {
        state["name"]: sum(state_items(state, tokens, case.page_size) for tokens in TOKENS) + _SPARE
        for state in shape["states"]
    }
    sides = case.prefill if role == "prefill" else (case.decode,)
    for instance, side in enumerate(sides):
        for unique in range(side.size):
            yield Start(
                name=f"{role}-{unique}" if len(sides) == 1 else f"p{instance}-{role}-{unique}",
                fleet_dir=str(directory),
                role=role,
                instance=instance if role == "prefill" else -1,
                unique=unique,
                prefill=tuple(map(_sizes, case.prefill)),
                bootstraps=tuple(f"ipc://{directory}/boot-{number}" for number in range(len(case.prefill))),
                decode=_sizes(case.decode),
                shape=shape,
                page_size=case.page_size,
                page_order=case.page_order,
                pool_pages=sum(page_count(tokens, case.page_size) for tokens in TOKENS) + _SPARE,
                state_slots=slots,
                aux_slots=len(TOKENS) + 2,
                seed=hash_of(case.name),
                config=config,
            )


def cuts_of(case: Case, room: Room) -> list[tuple[int, int]]:
    """Pages [first, end) of each forward of a chunked prefill; the chunks are not aligned to the grid's cells."""
    pages = page_count(room.tokens, case.page_size)
    step = max(1, 70 // case.page_size) if room.index == 0 else pages
    return [(first, min(first + step, pages)) for first in range(0, pages, step)]


def groups_of(layers: range) -> list[range]:
    """Groups of two layers; the last may have one."""
    return [range(lo, min(lo + 2, layers.stop)) for lo in range(layers.start, layers.stop, 2)]


def hash_of(text: str) -> int:
    """A number below 2^48 that is the same in every process and run."""
    value = 14695981039346656037
    for byte in text.encode():
        value = (value ^ byte) * 1099511628211 % 2**64
    return value >> 16


def _sizes(side: ParallelConfig) -> Sizes:
    return Sizes(side.dp, side.pp, side.cp, side.tp, side.stages)
