"""Finds settings by measurement: varies one setting after another and keeps the best value of each.

Every combination of settings is measured by a short bench on this machine. All benches have the same seed and therefore
transfer the same rooms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kvctl.lab.bench.program import Program
from kvctl.lab.bench.session import Session, Steps, measure, trials_of
from kvctl.lab.bench.variants import Variant
from kvctl.lab.ranks.plan import Plan

CHUNKS = (1024, 2048, 4096, 8192, 16384)
_MIB = 1 << 20
# Throughput of equal settings differs by a few percent from run to run.
_MARGIN = 1.05
# A change of the page size affects the whole engine, so it must gain more.
_PAGE_SIZE_MARGIN = 1.10
_GROUPS = (2, 4, 8)

Options = Mapping[str, Any]
Fleets = Sequence[tuple[Variant, Plan]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of settings with its measurement.

    Attributes:
        cp_mode: context-parallel mode of the agents; "" without context parallelism.
        ring_bytes: size of each decode rank's staging ring; 0 if the path does not use it.
        pipeline: "off", "on" or a number of layers per group.
        padded_ratio: share of the transferred tokens that is padding in the last page of a room.
        row: result row of the bench that measured these settings.
        recommended: whether these settings are the best ones measured.
        why: reason for recommending or not recommending them.
    """

    path: str
    page_size: int
    chunk_tokens: int
    cp_mode: str
    ring_bytes: int
    pipeline: str
    padded_ratio: float
    row: Mapping[str, Any]
    recommended: bool = False
    why: str = ""

    @property
    def rooms_per_s(self) -> float:
        return float(self.row["rooms_per_s"])

    @property
    def p50_ms(self) -> float:
        return float(self.row["latency_ms"]["p50"])

    @property
    def hidden_ratio(self) -> float | None:
        """Share of the transfer time that overlapped with compute; None without simulated compute."""
        hidden, exposed = self.row["hidden_ms"]["mean"], self.row["exposed_ms"]["mean"]
        return hidden / (hidden + exposed) if self.row["layer_ms"] and hidden is not None and hidden + exposed else None

    def better_than(self, other: Candidate, margin: float) -> bool:
        """Whether throughput is higher than the other's by the factor `margin`, or about equal with lower p50 latency.

        Args:
            margin: factor above 1 by which two values must differ to count as different.
        """
        if self.rooms_per_s > other.rooms_per_s * margin:
            return True
        return self.rooms_per_s * margin > other.rooms_per_s and self.p50_ms * margin < other.p50_ms

    def settings(self) -> dict[str, str | int]:
        """Returns the settings as keys of the agent's configuration."""
        found: dict[str, str | int] = {"path": self.path, "chunk_tokens": self.chunk_tokens}
        if self.ring_bytes:
            found["staging_ring_mb"] = -(-self.ring_bytes // _MIB)
        if self.cp_mode:
            found["cp_mode"] = self.cp_mode
        if self.pipeline != "off":
            found["pipeline"] = "on"
        if self.pipeline.isdecimal():
            found["pipeline_group_size"] = int(self.pipeline)
        return found


def tune(
    measured: Callable[[str, Options], Iterator[Candidate]],
    page_sizes: Sequence[int],
    cp_modes: Sequence[str],
    prompt_tokens: int,
    layers: int,
    layer_ms: float,
) -> list[Candidate]:
    """Varies path and CP mode, page size, chunk size and layer groups, in this order.

    Args:
        measured: runs a bench with some options changed and yields its candidates; called with the name of the varied
            setting and the options.
        page_sizes: page sizes to try; the first one is the engine's own.
        cp_modes: context-parallel modes to try.
        prompt_tokens: length of the longest prompt; chunk sizes of this length or more make no difference.
        layers: number of layers of the model.
        layer_ms: simulated compute time per layer; layer groups are tried only if it is not 0.

    Returns:
        All candidates: the recommended one, then the others by descending throughput.
    """
    own, *others = page_sizes
    first = list(measured("paths", {"page_size": own, "cp_modes": tuple(cp_modes)}))
    if not first:
        return []
    every = first
    best = _best(first, _MARGIN)

    def vary(name: str, changes: Sequence[Options], margin: float = _MARGIN) -> None:
        nonlocal best
        kept: Options = {
            "paths": (best.path,),
            "cp_modes": (best.cp_mode or cp_modes[0],),
            "page_size": best.page_size,
            "chunk_tokens": best.chunk_tokens,
        }
        tried = [each for change in changes for each in measured(name, {**kept, **change})]
        # Settings that were measured once more are compared by their new figures, which are of the same run.
        every[:] = [each for each in every if not any(_same_settings(each, new) for new in tried)] + tried
        again = [each for each in tried if _same_settings(each, best)]
        best = _best([*(again or [best]), *(each for each in tried if each not in again)], margin)

    vary("page size", [{"page_size": size} for size in others], _PAGE_SIZE_MARGIN)
    chunks = [chunk for chunk in CHUNKS if chunk < prompt_tokens and chunk != best.chunk_tokens]
    vary("chunk", [{"chunk_tokens": chunk} for chunk in chunks])
    if layer_ms and layers > 1:
        sizes = dict.fromkeys(str(-(-layers // groups)) for groups in _GROUPS)
        vary("layer groups", [{"pipelines": ("off", "on", *sizes)}])
    ranked = sorted(every, key=lambda each: (each is not best, -each.rooms_per_s))
    return [replace(each, recommended=each is best, why=_why(each, best)) for each in ranked]


def run_fleets(program: Program, fleets: Fleets, steps: Steps, point_s: float | None, label: str) -> list[Candidate]:
    """Starts the fleets, measures them in alternation and returns one candidate per result row.

    Args:
        steps: progress display.
        point_s: time limit in seconds of one case and repeat; None: no limit.
        label: prefix of the steps in the progress display.

    Raises:
        FleetError: a rank died, reported an error or did not answer in time.
        TuneFailed: rooms failed, or received bytes were wrong.
    """
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                Session(
                    variant, plan, program, steps, "sample", point_s, label, variant.name if len(fleets) > 1 else ""
                )
            )
            for variant, plan in fleets
        ]
        steps.expect(sum(trials_of(program, plan) for _, plan in fleets))
        measure(sessions, steps, roofline=False)
        for session in sessions:
            session.fleet.stop()
    problems = [line for session in sessions for line in session.results.problems]
    if problems:
        raise TuneFailed("; ".join(problems))
    return [
        _candidate(variant, plan, row)
        for (variant, plan), session in zip(fleets, sessions, strict=True)
        for row in session.results.rows()
    ]


class TuneFailed(Exception):
    """Raised when rooms failed or received bytes were wrong."""


def _candidate(variant: Variant, plan: Plan, row: Mapping[str, Any]) -> Candidate:
    page = plan["page_size"]
    lengths = [room["tokens"] - room["prefix_tokens"] for room in plan["loads"][0]["rooms"]]
    padded = sum(-(-length // page) * page for length in lengths)
    has_cp = any(sizes.cp > 1 for sizes in variant.request.prefill)
    return Candidate(
        path=row["path"],
        page_size=page,
        chunk_tokens=plan["chunk_tokens"],
        cp_mode=variant.request.cp_mode if has_cp else "",
        ring_bytes=plan["ring_bytes"] if row["path"] in ("staged", "auto") else 0,
        pipeline=row["pipeline"],
        padded_ratio=1 - sum(lengths) / padded if padded else 0.0,
        row=row,
    )


def _best(candidates: Sequence[Candidate], margin: float) -> Candidate:
    """Returns the best candidate; an earlier one wins unless a later one is better by `margin`."""
    best = candidates[0]
    for each in candidates[1:]:
        if each.better_than(best, margin):
            best = each
    return best


def _same_settings(one: Candidate, other: Candidate) -> bool:
    fields = ("path", "page_size", "chunk_tokens", "cp_mode", "pipeline")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _why(candidate: Candidate, best: Candidate) -> str:
    if candidate is best:
        return "the best of those measured"
    if candidate.rooms_per_s * _MARGIN < best.rooms_per_s:
        return f"{best.rooms_per_s / candidate.rooms_per_s:.1f} times fewer rooms per second"
    if candidate.p50_ms > best.p50_ms * _MARGIN:
        return f"{candidate.p50_ms / best.p50_ms:.1f} times the latency"
    if candidate.padded_ratio > best.padded_ratio + 0.01:
        return f"about as good, but {candidate.padded_ratio:.0%} of its bytes fill up pages"
    if candidate.page_size != best.page_size:
        return "about as good; not worth another page size"
    return "about as good"
