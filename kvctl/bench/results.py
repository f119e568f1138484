"""Turns laps into results: one row per load and path, with the names that scripts rely on (`kvctl.bench/1`).

A room's latency is from the moment the last prefill rank had its forward done to the moment the last decode rank may
start. Rates are bytes and rooms over the wall-clock union of all spans from forward start to success, so that a pause
between lots counts for nobody and waiting inside one for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvctl.bench.costs import Costs
from kvctl.bench.laps import LOAD_STRIDE, Lap
from kvctl.bench.passages import Finished, by_repeat, join, rate
from kvctl.bench.statistics import median, stage_us, summary_ms
from kvctl_agent.contract.rig import Mismatch, Plan, PlannedRank, Ready

SCHEMA = "kvctl.bench/1"
STAGES = ("gather", "gate", "post", "wire", "scatter")
_MOST_LINES = 3


class Results:
    """Collects laps; can be asked at any time, also of a bench that was cut short.

    Attributes:
        ready: what each rank said of itself when it was up.
        floors: every figure measured, by kind: "memcpy", "write".
    """

    def __init__(self, plan: Plan, names: Mapping[str, PlannedRank], verify: str) -> None:
        self._plan = plan
        self._names = names
        self._verify = verify
        self._laps: dict[tuple[int, str], list[Finished]] = {}
        self._nbytes = {
            load * LOAD_STRIDE + index: room["bytes"]
            for load, planned in enumerate(plan["loads"])
            for index, room in enumerate(planned["rooms"])
        }
        self.ready: Mapping[str, Ready] = {}
        self.floors: dict[str, list[float]] = {"memcpy": [], "write": []}

    def add(self, lap: Lap) -> None:
        """Take a lap in."""
        finished = join(lap, self._names, self._nbytes)
        self._laps.setdefault((lap.load, lap.path), []).append(finished)

    @property
    def verified(self) -> bool | None:
        """Whether every byte was where it belongs; None where nobody looked."""
        seen = [row["verified"] for row in self.rows()]
        return None if None in seen or not seen else all(seen)

    @property
    def trouble(self) -> list[str]:
        """What kept the bench from being a success, in a few lines."""
        every = [finished for laps in self._laps.values() for finished in laps]
        causes = [text for finished in every for text in finished.failures.values()]
        wrong = [mismatch for finished in every for mismatch in _mismatches(finished)]
        counts = {text: causes.count(text) for text in dict.fromkeys(causes)}
        lines = [f"{count} room{'s' * (count > 1)} failed: {text}" for text, count in counts.items()][:_MOST_LINES]
        return lines + [_explained(mismatch) for mismatch in wrong[:_MOST_LINES]]

    def floor(self, kind: str) -> float | None:
        """The best figure seen: a floor is what this machine can do, not what it had left at a moment."""
        return max(self.floors[kind], default=None)

    def document(self, environment: Mapping[str, object]) -> dict[str, Any]:
        """The whole result, as `--save` writes it."""
        return {
            "schema": SCHEMA,
            "verified": self.verified,
            "shape": self._plan["shape"],
            "floors": {
                "memcpy_gb_per_s": self.floor("memcpy"),
                "transport_write_gb_per_s": self.floor("write"),
                "device_copy_gb_per_s": None,
                "p2p_gb_per_s": None,
            },
            "runs": self.rows(),
            "env": environment,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row per load and path that ran, in the plan's order."""
        keys = sorted(self._laps, key=lambda key: (key[0], self._plan["paths"].index(key[1])))
        return [self._row(load, path, self._laps[load, path]) for load, path in keys]

    def _row(self, load: int, path: str, laps: Sequence[Finished]) -> dict[str, Any]:
        planned = self._plan["loads"][load]
        passages = [passage for finished in laps for passage in finished.passages.values()]
        failed = sum(len(finished.failures) for finished in laps)
        rates = [rate(repeat) for repeat in by_repeat(laps)]
        middle = median([each.gb_per_s for each in rates])
        typical = min(rates, key=lambda each: abs(each.gb_per_s - middle))
        costs = Costs(laps, self._names, self.ready)
        memcpy, write = self.floor("memcpy"), self.floor("write")
        latency = summary_ms(each.latency_ns for each in passages)
        verified: bool | None = None
        if self._verify != "off":
            verified = not failed and not any(_mismatches(finished) for finished in laps)
        parts = sum(costs.by_label("kvctl_parts_total", "decode").values())
        mean_tokens = planned["tokens_mean"]
        return {
            "path": path,
            "transport": self._plan["transport"],
            "device": "cpu",
            "pipeline": "off",
            "cp_mode": "rank0",
            "concurrency": planned["concurrency"],
            "in_flight": planned["in_flight"],
            "tokens": mean_tokens if mean_tokens % 1 else int(mean_tokens),
            "tokens_drawn": planned["tokens"],
            "page_size": self._plan["page_size"],
            "page_order": self._plan["page_order"],
            "rooms": len(passages) + failed,
            "failed": failed,
            "verified": verified,
            "verified_parts": parts if verified else 0,
            "lots": len(planned["lots"]),
            "repeats": len(rates),
            **asdict(typical),
            "gb_per_s_per_decode_rank": typical.gb_per_s / self._ranks("decode"),
            "best": asdict(max(rates, key=lambda each: each.gb_per_s)),
            "memcpy_ratio": typical.gb_per_s / memcpy if memcpy else None,
            "write_ratio": typical.gb_per_s / write if write else None,
            "bytes_per_room": sum(each.nbytes for each in passages) // max(1, len(passages)),
            "latency_ms": latency,
            "exposed_ms": latency,  # nothing is computed beside a transfer, so all of it is exposed
            "ttft_ms": summary_ms(each.success_ns - each.opened_ns for each in passages),
            "descriptors_per_room": costs.per_room("kvctl_descriptors_total"),
            "writes_per_room": costs.per_room("kvctl_writes_total"),
            "engine_posts_per_room": costs.per_room("kvctl_engine_posts_total"),
            "paths_taken": costs.by_label("kvctl_parts_total", "prefill"),
            "fallbacks": costs.fallbacks,
            "peak_rss_bytes": costs.peak_rss_bytes,
            "rss_overhead_bytes": costs.rss_overhead_bytes,
            "cpu_seconds": costs.cpu_seconds,
            "stages_us": {stage: stage_us(costs.stage(stage)) for stage in STAGES},
            "ring_high_water_bytes": costs.ring_high_water_bytes,
        }

    def _ranks(self, role: str) -> int:
        return sum(rank["role"] == role for rank in self._names.values())


def _mismatches(finished: Finished) -> list[Mismatch]:
    return [mismatch for verdict in finished.lap.verdicts.values() for mismatch in verdict["mismatches"]]


def _explained(wrong: Mismatch) -> str:
    where = f"room {wrong['room']} layer {wrong['layer']} {wrong['kv']} token {wrong['token']} head {wrong['head']} "
    if wrong["kv"] == "aux":
        where = f"room {wrong['room']} aux "
    elif wrong["kv"] == "stray":
        where = f"layer {wrong['layer']} "
    return f"{where}dim {wrong['dim']}: expected {wrong['expected']}, found {wrong['found']} ({wrong['hint']})"
