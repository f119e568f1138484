"""Finds settings by measurement: varies one setting after another and keeps the best value of each.

Every combination of settings is measured by a short bench on this machine, in turns with the best one so far, which it
replaces only if their rounds tell them apart. All benches have the same seed and therefore transfer the same rooms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from kvctl.lab.bench.rows import delta_of, p50_ms, same_choice
from kvctl.lab.bench.session import Session, Steps, measure
from kvctl.lab.bench.trials import Program
from kvctl.lab.bench.variants import Variant
from kvctl.lab.ranks.plan import Plan

CHUNKS = (1024, 2048, 4096, 8192, 16384)
_MIB = 1 << 20
# What a setting must gain besides being told apart, to be worth setting.
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
        why: comparison with the best settings that they took turns with.
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
        """Whether throughput is higher than the other's, or not shown to be lower with lower p50 latency.

        Args:
            margin: factor above 1 by which the median must be better; the rounds must tell it apart, too.
        """
        rate, latency = (delta_of(other.row, self.row, value) for value in (_rooms_per_s, p50_ms))
        if self.rooms_per_s > other.rooms_per_s * margin and rate.significant:
            return True
        lower = rate.significant and self.rooms_per_s < other.rooms_per_s
        return not lower and self.p50_ms * margin < other.p50_ms and bool(latency.significant)

    def settings(self) -> dict[str, str | int]:
        """Returns the settings as keys of the agent's configuration; the page size is the engine's."""
        found: dict[str, str | int] = {
            "transport": self.row["transport"],
            "path": self.path,
            "chunk_tokens": self.chunk_tokens,
        }
        if self.ring_bytes:
            found["staging_ring_mb"] = -(-self.ring_bytes // _MIB)
        if self.cp_mode:
            found["cp_mode"] = self.cp_mode
        found["pipeline"] = "on" if self.pipeline.isdecimal() else self.pipeline
        if self.pipeline.isdecimal():
            found["pipeline_group_size"] = int(self.pipeline)
        return found


def tune(
    measured: Callable[[str, Sequence[Options]], Iterator[Candidate]],
    page_sizes: Sequence[int],
    cp_modes: Sequence[str],
    prompt_tokens: int,
    layers: int,
    layer_ms: float,
    together: int = 1,
) -> list[Candidate]:
    """Varies path and CP mode, page size, chunk size and layer groups, in this order.

    Args:
        measured: runs benches with some options changed in turns and yields their candidates; called with the name of
            the varied setting and the options of each bench.
        page_sizes: page sizes to try; the first one is the engine's own.
        prompt_tokens: length of the longest prompt; chunk sizes of this length or more make no difference.
        layer_ms: simulated compute time per layer; layer groups are tried only if it is not 0.
        together: number of benches that can take turns with that of the best settings.

    Returns:
        All candidates: the recommended one, then the others in the order in which they were measured.
    """
    own, *others = page_sizes
    first = list(measured("paths", [{"page_size": own, "cp_modes": tuple(cp_modes)}]))
    if not first:
        return []
    # Path auto, which suits other rooms as well, unless another path is better.
    every, best = _compared(sorted(first, key=lambda each: each.path != "auto"), _MARGIN)

    def kept() -> Options:
        modes = (best.cp_mode or cp_modes[0],)
        sizes = {"page_size": best.page_size, "chunk_tokens": best.chunk_tokens}
        return {"paths": (best.path,), "cp_modes": modes, **sizes}

    def take_turns(name: str, benches: Sequence[Options], margin: float) -> None:
        nonlocal best
        tried = sorted(measured(name, benches), key=lambda each: not _same_settings(each, best))
        compared, best = _compared(tried, margin)
        # Settings that were measured once more count with their new figures.
        every[:] = [each for each in every if not any(_same_settings(each, new) for new in compared)] + compared

    def vary(name: str, key: str, values: Sequence[int], margin: float = _MARGIN) -> None:
        for at in range(0, len(values), together):
            take_turns(name, [kept(), *({**kept(), key: value} for value in values[at : at + together])], margin)

    vary("page size", "page_size", others, _PAGE_SIZE_MARGIN)
    vary("chunk", "chunk_tokens", [chunk for chunk in CHUNKS if chunk < prompt_tokens and chunk != best.chunk_tokens])
    if layer_ms and layers > 1:
        sizes = dict.fromkeys(str(-(-layers // groups)) for groups in _GROUPS)
        take_turns("layer groups", [{**kept(), "pipelines": ("off", "on", *sizes)}], _MARGIN)
    chosen = [replace(each, recommended=True) for each in every if _same_settings(each, best)]
    return chosen + [each for each in every if not _same_settings(each, best)]


def run_fleets(program: Program, fleets: Fleets, steps: Steps, point_s: float | None, label: str) -> list[Candidate]:
    """Starts the fleets, measures them in alternation and returns one candidate per result row.

    Args:
        point_s: time limit in seconds of one case and repeat; None: no limit.

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
        steps.expect(sum(program.trials(plan) for _, plan in fleets))
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


def _compared(candidates: Sequence[Candidate], margin: float) -> tuple[list[Candidate], Candidate]:
    """Returns the candidates, which took turns, with `why`, and the best one.

    An earlier candidate is the best unless a later one is better by `margin`.
    """
    best = candidates[0]
    for each in candidates[1:]:
        if each.better_than(best, margin):
            best = each
    compared = [replace(each, why=_why(each, best)) for each in candidates]
    return compared, compared[candidates.index(best)]


def _same_settings(one: Candidate, other: Candidate) -> bool:
    fields = ("path", "page_size", "chunk_tokens", "cp_mode", "pipeline")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _why(candidate: Candidate, best: Candidate) -> str:
    if candidate is best:
        return "none is shown to be better"
    alike = _same_settings(candidate, replace(best, path=candidate.path, pipeline=candidate.pipeline))
    if alike and same_choice(best.row, candidate.row):
        name = best.path if best.path != candidate.path else f"pipeline {best.pipeline}"
        return f"= {name}: it sent the same parts"
    rate, latency = (delta_of(best.row, candidate.row, value) for value in (_rooms_per_s, p50_ms))
    if rate.significant is None:
        return f"{rate.ratio or 0.0:+.0%} rooms/s, too few rounds"
    for name, delta in (("rooms/s", rate), ("latency", latency)):
        if delta.significant:
            return f"{delta.ratio or 0.0:+.0%} {name}"
    if candidate.padded_ratio > best.padded_ratio + 0.01:
        return f"spreads overlap, {candidate.padded_ratio:.0%} padding"
    return "spreads overlap"


def _rooms_per_s(row: Mapping[str, Any]) -> float | None:
    figure: float | None = row["rooms_per_s"]
    return figure
