"""Determines the fleets of a bench: several if it compares transports, CP modes or layouts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kvctl.lab.ranks.request import PlanRequest, Sizes

MAX_RANKS = 24
"""Maximum number of rank processes that run at the same time; fleets that exceed it run one after another."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One fleet of a bench.

    Attributes:
        label: transport and CP mode, as far as they differ between the fleets; "" if neither differs.
    """

    label: str
    request: PlanRequest

    @property
    def ranks(self) -> int:
        """Number of prefill and decode ranks."""
        return sum(map(size, self.request.prefill)) + size(self.request.decode)

    @property
    def name(self) -> str:
        """Name of the fleet as used within agents' names: lower case, digits and hyphens; "" if there is one fleet."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


def expand(request: PlanRequest, transports: Sequence[str], cp_modes: Sequence[str]) -> list[Variant]:
    """Returns a variant of the request for each transport in each CP mode."""
    variants = []
    for transport, mode in product(transports, cp_modes):
        words = [transport] * (len(transports) > 1) + [mode] * (len(cp_modes) > 1)
        variants.append(Variant(" ".join(words), replace(request, transport=transport, cp_mode=mode)))
    return variants


def waves(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Divides fleets into lists that run one after another; fleets in one list run at the same time.

    They become one list, in which they share the memory equally, if they have at most `MAX_RANKS` ranks; otherwise each
    of them runs alone.
    """
    if sum(variant.ranks for variant in variants) > MAX_RANKS:
        return [[variant] for variant in variants]
    share = len(variants)
    return [
        [
            replace(each, request=replace(each.request, memory_bytes=each.request.memory_bytes // share))
            for each in variants
        ]
    ]


def size(sizes: Sizes) -> int:
    """Returns the number of ranks of an instance."""
    return sizes.dp * sizes.pp * sizes.cp * sizes.tp


def sizes_text(sizes: Sizes) -> str:
    """Formats sizes as `dp2 tp4`; a single rank is `tp1`."""
    axes = {"dp": sizes.dp, "pp": sizes.pp, "cp": sizes.cp, "tp": sizes.tp}
    stages = "+".join(map(str, sizes.layers))
    words = [f"{axis}{stages if axis == 'pp' and stages else number}" for axis, number in axes.items() if number > 1]
    return " ".join(words) or "tp1"


def pages_text(sizes: Mapping[str, Any]) -> str:
    """Formats the pages and pool layouts of a plan or a run: `pages of 16 to 64, hnd to fused`."""
    pages = dict.fromkeys((sizes["page_size"], sizes.get("decode_page_size", sizes["page_size"])))
    words = [f"pages of {' to '.join(map(str, pages))}"]
    layouts = dict.fromkeys(sizes.get("kv_layouts", ("nhd",)))
    if list(layouts) != ["nhd"]:
        words.append(" to ".join(layouts))
    if run := sizes.get("cp_interleave"):
        words.append(f"{run} token{'s' * (run > 1)} in turn on each decode cp rank")
    return ", ".join(words)
