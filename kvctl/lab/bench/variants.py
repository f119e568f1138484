"""Which fleets a bench needs: one for everything that one fleet can compare, more where it cannot."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvctl.lab.ranks.request import PlanRequest, Sizes

MOST_RANKS = 24
"""Ranks that are alive at the same time, beyond which fleets run one after another: each is a process."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One fleet.

    Attributes:
        label: what sets it apart from those it is compared with, "" where it is alone.
        fleet: what a preset calls it, "" where it has no name for it.
    """

    label: str
    request: PlanRequest
    fleet: str = ""

    @property
    def ranks(self) -> int:
        """Processes of the fleet."""
        return sum(map(size, self.request.prefill)) + size(self.request.decode)

    @property
    def name(self) -> str:
        """What sets it apart, as part of an agent's name."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.fleet} {self.label}".lower()).strip("-")


def expand(request: PlanRequest, transports: Sequence[str], cp_modes: Sequence[str]) -> list[Variant]:
    """The request over each transport in each CP mode."""
    variants = []
    for transport, mode in product(transports, cp_modes):
        words = [transport] * (len(transports) > 1) + [mode] * (len(cp_modes) > 1)
        variants.append(Variant(" ".join(words), replace(request, transport=transport, cp_mode=mode)))
    return variants


def waves(groups: Iterable[Sequence[Variant]]) -> list[list[Variant]]:
    """Fleets that are alive together: each group where it has at most `MOST_RANKS` ranks, else one by one.

    Those of one wave share the memory.
    """
    together: list[list[Variant]] = []
    for group in groups:
        if sum(variant.ranks for variant in group) <= MOST_RANKS:
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
    """Ranks of an instance."""
    return sizes.dp * sizes.pp * sizes.cp * sizes.tp


def sizes_text(sizes: Sizes) -> str:
    """As people write it: `dp2 tp4`; `tp1` for a single rank."""
    axes = {"dp": sizes.dp, "pp": sizes.pp, "cp": sizes.cp, "tp": sizes.tp}
    stages = "+".join(map(str, sizes.layers))
    words = [f"{axis}{stages if axis == 'pp' and stages else number}" for axis, number in axes.items() if number > 1]
    return " ".join(words) or "tp1"
