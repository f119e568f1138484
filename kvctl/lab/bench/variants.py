"""The fleets of a bench: more than one if it compares what one fleet cannot run (transports, CP modes, layouts)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvctl.lab.ranks.request import PlanRequest, Sizes

MAX_RANKS = 24
"""Limit of ranks, each a process, that run at the same time; fleets that exceed it run one after another."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One fleet.

    Attributes:
        label: transport and CP mode, as far as they differ between the fleets; "" if there is only one.
        fleet: name in the preset, or "".
    """

    label: str
    request: PlanRequest
    fleet: str = ""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(map(size, self.request.prefill)) + size(self.request.decode)

    @property
    def name(self) -> str:
        """Name as part of an agent's name; "" if there is only one fleet."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.fleet} {self.label}".lower()).strip("-")


def expand(request: PlanRequest, transports: Sequence[str], cp_modes: Sequence[str]) -> list[Variant]:
    """Returns a variant of the request for each transport in each CP mode."""
    variants = []
    for transport, mode in product(transports, cp_modes):
        words = [transport] * (len(transports) > 1) + [mode] * (len(cp_modes) > 1)
        variants.append(Variant(" ".join(words), replace(request, transport=transport, cp_mode=mode)))
    return variants


def waves(groups: Iterable[Sequence[Variant]]) -> list[list[Variant]]:
    """Returns lists of fleets that run at the same time and share the memory.

    A group is one list if it has at most `MAX_RANKS` ranks; otherwise each of its fleets runs alone.
    """
    together: list[list[Variant]] = []
    for group in groups:
        if sum(variant.ranks for variant in group) <= MAX_RANKS:
            together.append(
                [
                    replace(each, request=replace(each.request, memory_bytes=each.request.memory_bytes // len(group)))
                    for each in group
                ]
            )
        else:
            together += [[variant] for variant in group]
    return together


def size(sizes: Sizes) -> int:
    """Returns the number of ranks of an instance."""
    return sizes.dp * sizes.pp * sizes.cp * sizes.tp


def sizes_text(sizes: Sizes) -> str:
    """Formats sizes as `dp2 tp4`; a single rank is `tp1`."""
    axes = {"dp": sizes.dp, "pp": sizes.pp, "cp": sizes.cp, "tp": sizes.tp}
    stages = "+".join(map(str, sizes.layers))
    words = [f"{axis}{stages if axis == 'pp' and stages else number}" for axis, number in axes.items() if number > 1]
    return " ".join(words) or "tp1"
