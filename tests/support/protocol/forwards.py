"""Builds the calls of a simulated prefill engine for one room: its forwards, plain or divided into layer groups."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from kvctl_agent.protocol import events as ev

Group = tuple[int, int]


def tiles(layers: range, size: int) -> tuple[Group, ...]:
    """Divides layers into groups of `size`; the last group may be smaller."""
    return tuple((lo, min(lo + size, layers.stop)) for lo in range(layers.start, layers.stop, size))


def forwards(
    room: int,
    layers: range,
    first_page: int,
    sends: Sequence[int],
    groups: Sequence[int],
    *,
    declare: bool = True,
    told: int = 0,
    finish: ev.Finish,
    together: bool = False,
    dice: random.Random | None = None,
) -> tuple[ev.Event, ...]:
    """Returns the calls for one room on one rank.

    Args:
        layers: layers of this rank.
        first_page: first of the consecutive pages that the forwards fill.
        sends: number of pages of each forward.
        groups: layers in a group of each forward, 0 for a plain one; the last number applies to the rest.
        declare: whether the groups are declared in advance.
        told: declared layers in a group, if the engine then uses other groups.
        finish: the last call.
        together: whether this call has the last pages, if their forward is a plain one.
        dice: shuffles the groups of each forward.
    """
    sizes = [groups[min(number, len(groups) - 1)] if groups else 0 for number in range(len(sends))]
    calls: list[ev.Event] = [ev.SendRoom(room)]
    first = next((size for size in sizes if size), 0)
    told = told or first
    if declare or not first:
        calls.append(ev.Prefetch(room, tiles(layers, told) if told else ()))
    for number, (count, size) in enumerate(zip(sends, sizes, strict=True), 1):
        filled = np.arange(first_page, first_page + count, dtype=np.int32)
        first_page += count
        parts: list[Group | None] = [*tiles(layers, size)] if size else [None]
        if dice is not None:
            dice.shuffle(parts)
        calls += [ev.SendPages(room, filled, number == len(sends), finish.at_ns, part) for part in parts]
    if together and not sizes[-1]:
        pages = calls.pop()
        assert isinstance(pages, ev.SendPages)
        finish = replace(finish, pages=pages)
    calls.append(finish)
    return tuple(calls)
