"""Summarises how many forwards prefill ranks pipelined, and the reasons against it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.report import Line, Span
from kvctl_agent.contract.choices import PIPELINED, REASONS


class Decisions:
    """Pipelining decisions, summed over all prefill ranks that answered `status`."""

    def __init__(self, statuses: Iterable[Mapping[str, Any]]) -> None:
        uses = [use for status in statuses if (use := status.get("pipeline"))]
        self.ranks = len(uses)
        self.modes = sorted({_mode(use) for use in uses})
        self.by_reason: Counter[str] = Counter()
        for use in uses:
            self.by_reason.update(use["decisions"])

    @property
    def off(self) -> bool:
        """Whether pipelining is off on all ranks and no forward was pipelined."""
        return self.modes in ([], ["off"]) and not any(self.by_reason[reason] for reason in PIPELINED)

    def summary(self) -> list[Span]:
        """Formats `on from 3,072 tokens   120 of 132 forwards (on 2 ranks) pipelined, else mostly few-tokens`."""
        spans: list[Span] = [(" or ".join(self.modes), "bold")]
        total = sum(self.by_reason.values())
        if not total:
            return [*spans, ("   no forward yet", "dim")]
        pipelined = sum(self.by_reason[reason] for reason in PIPELINED)
        ranks = f" (on {self.ranks} ranks)" if self.ranks > 1 else ""
        spans.append((f"   {pipelined:,} of {total:,} forwards{ranks} pipelined", ""))
        others = [(count, reason) for reason, count in self.by_reason.items() if reason not in PIPELINED and count]
        if others:
            _, most = max(others)
            spans.append((f", else {'mostly ' * (len(others) > 1)}{most}", "yellow" if not pipelined else ""))
        return spans

    def lines(self) -> list[Line]:
        """Formats the summary followed by every reason with its explanation."""
        if not self.ranks:
            return []
        head: Line = [("pipeline ", "dim"), *self.summary()]
        if self.off:
            return [head]
        counts = [(units.count(self.by_reason[reason]), reason) for reason in REASONS if self.by_reason[reason]]
        # An agent that is newer than this kvctl may report further reasons.
        counts += [(units.count(self.by_reason[reason]), reason) for reason in sorted(self.by_reason.keys() - REASONS)]
        return [head, *_columns(counts)]


def _mode(use: Mapping[str, Any]) -> str:
    if use["mode"] == "off":
        return "off"
    if use["group_size"] is not None:
        return f"{use['mode']}, {units.count(use['group_size'])} layers a group"
    return f"{use['mode']} from {units.count(use['min_tokens'])} tokens"


def _columns(counts: Sequence[tuple[str, str]]) -> list[Line]:
    number = max((len(count) for count, _ in counts), default=0)
    name = max((len(reason) for _, reason in counts), default=0)
    return [
        [
            (f"  {count:>{number}}  ", ""),
            (f"{reason:<{name}}", "green" if reason in PIPELINED else "yellow"),
            (f"  {REASONS.get(reason, '')}", "dim"),
        ]
        for count, reason in counts
    ]
