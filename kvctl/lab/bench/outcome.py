"""What came out of a whole bench, over all its fleets: rows to compare, the saved document, the report's data.

Asked at any time, also of a bench that was cut short: what has been measured by then is what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvctl.lab.bench import roofline as limits
from kvctl.lab.bench.deltas import with_delta
from kvctl.lab.bench.html.data import ReportData
from kvctl.lab.bench.machine import fingerprint
from kvctl.lab.bench.session import Session
from kvctl.lab.bench.timelines import ring_timelines, room_timelines
from kvctl.lab.bench.traffic import Source, hits
from kvctl.lab.bench.variants import Variant, sizes_text
from kvctl.lab.ranks.messages import Gpu
from kvctl.lab.ranks.request import FloorKind

SCHEMA = "kvctl.lab.bench/1"


@dataclass(frozen=True, slots=True)
class Measured:
    """One fleet's part of the outcome."""

    variant: Variant
    session: Session


class Outcome:
    """Collects what every fleet measured."""

    def __init__(self, preset: str = "", source: Source | None = None) -> None:
        """
        Args:
            preset: its name, or "".
            source: real traffic, where there was any.
        """
        self.measured: list[Measured] = []
        self._preset = preset
        self._source = source

    @property
    def verified(self) -> bool | None:
        """Whether every byte was where it belongs; None where nobody looked."""
        verdicts = [each.session.results.verified for each in self.measured if each.session.results.laps()]
        return None if None in verdicts or not verdicts else all(verdicts)

    @property
    def trouble(self) -> list[str]:
        """What kept the bench from being a success, in a few lines for each fleet."""
        several = len(self.measured) > 1
        return [
            f"{_label(each)}: {line}" if several else line
            for each in self.measured
            for line in each.session.results.trouble
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One row per case of every fleet, those of one load together, with Δ against the first of them."""
        return with_delta([row for each in self.measured for row in self._rows(each)])

    def floors(self) -> dict[str, dict[str, float | None]]:
        """The best figure of each kind that any fleet saw, by transport."""
        found: dict[str, dict[str, float | None]] = {}
        for each in self.measured:
            seen = found.setdefault(each.variant.request.transport, dict.fromkeys(limits.EVERY))
            for kind in limits.EVERY:
                figures = [figure for figure in (seen[kind], each.session.results.floor(kind)) if figure is not None]
                seen[kind] = max(figures, default=None)
        return found

    def best_floor(self, kind: FloorKind) -> float | None:
        """The best figure of a kind that is no matter of the transport."""
        return max((figure for each in self.floors().values() if (figure := each[kind]) is not None), default=None)

    def gpus(self) -> dict[int, Gpu]:
        """The GPUs that were used, by number; empty where none was, or they have not said yet."""
        return {number: gpu for each in self.measured for number, gpu in each.session.gpus().items()}

    def document(self) -> dict[str, Any]:
        """The whole result, as `--save` writes it."""
        plan = self.measured[0].session.results.plan
        floors = self.floors()
        first = next(iter(floors.values()))
        lanes = sorted({lane for each in self.measured for lane in each.session.lanes()})
        document = {
            "schema": SCHEMA,
            "verified": self.verified,
            "shape": plan["shape"],
            "floors": {
                "memcpy_gb_per_s": self.best_floor("memcpy"),
                "transport_write_gb_per_s": first["write"],
                "write_gb_per_s_by_transport": {name: each["write"] for name, each in floors.items()},
                "device_copy_gb_per_s": self.best_floor("device"),
                "p2p_gb_per_s": self.best_floor("peer"),
            },
            "runs": self.rows(),
            "env": fingerprint(plan["device"], lanes, self.gpus()),
        }
        if self._preset:
            document["preset"] = self._preset
        if self._source is not None:
            document["traffic"] = {**self._source.facts, "requests": hits(plan)}
        return document

    def report(self, command: str, started_at: str) -> ReportData:
        """What `--html` draws."""
        data = ReportData(document=self.document(), command=command, started_at=started_at)
        sessions = [each.session.results for each in self.measured]
        data["waterfalls"] = [
            life for results in sessions for life in room_timelines(results.laps(), results.names, results.plan)
        ]
        data["rings"] = [
            life for results in sessions for life in ring_timelines(results.laps(), results.names, results.ready)
        ]
        return data

    def _rows(self, each: Measured) -> list[dict[str, Any]]:
        request, results, program = each.variant.request, each.session.results, each.session.program
        layout = {
            "fleet": each.variant.fleet,
            "prefill": " + ".join(map(sizes_text, request.prefill)),
            "decode": sizes_text(request.decode),
            "cp_size": max(sizes.cp for sizes in request.prefill),
            "decode_ms": request.decode_ms,
            "faults": list(request.faults),
        }
        return [
            {**row, **layout, **program.remarks(results.plan, case, results.latency_ms, row)}
            for case, row in zip(results.laps(), results.rows(), strict=True)
        ]


def _label(each: Measured) -> str:
    return " ".join(word for word in (each.variant.fleet, each.variant.label) if word)
