"""Collects the results of one fleet (`Results`) and of all fleets of a bench (`Outcome`).

Both can be read at any time, even after an interrupted bench: they contain everything measured so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvctl.lab.bench.machine import ROOFLINES, fingerprint
from kvctl.lab.bench.room_timing import TimedTrial, time_rooms
from kvctl.lab.bench.rows import mismatches, rounds_of, row_of, with_delta
from kvctl.lab.bench.trials import LOAD_STRIDE, Case, Trial
from kvctl.lab.bench.variants import Variant, sizes_text
from kvctl.lab.ranks.messages import Gpu, Mismatch, Ready
from kvctl.lab.ranks.plan import Plan, PlannedRank
from kvctl.lab.ranks.request import BUSY_ENGINES, FloorKind

SCHEMA = "kvctl.bench/1"
_MAX_PROBLEMS = 3


class Results:
    """All measurements of one fleet.

    Args:
        verify: One of `VERIFY_MODES`.

    Attributes:
        ready: Each rank's answer to the start command; empty until the fleet has started.
        roofline: All measured limits in GB/s, by kind.
    """

    def __init__(self, variant: Variant, plan: Plan, names: Mapping[str, PlannedRank], verify: str) -> None:
        self.variant = variant
        self.plan = plan
        self.names = names
        self.ready: Mapping[str, Ready] = {}
        self.roofline: dict[FloorKind, list[float]] = {kind: [] for kind in ROOFLINES}
        self._verify = verify
        self._trials: dict[Case, list[TimedTrial]] = {}
        self._nbytes = {
            load * LOAD_STRIDE + index: room["bytes"]
            for load, planned in enumerate(plan["loads"])
            for index, room in enumerate(planned["rooms"])
        }

    def add(self, trial: Trial) -> None:
        self._trials.setdefault(trial.case, []).append(time_rooms(trial, self.names, self._nbytes))

    @property
    def verified(self) -> bool | None:
        """Whether all rooms succeeded and every compared byte was correct; None if nothing was compared."""
        if not self._trials or self._verify == "off":
            return None
        return not any(trial.failures or mismatches(trial) for trials in self._trials.values() for trial in trials)

    @property
    def problems(self) -> list[str]:
        """Lines on failed rooms and wrong bytes; a few lines of each."""
        every = [trial for trials in self._trials.values() for trial in trials]
        causes = [text for trial in every for text in trial.failures.values()]
        counts = {text: causes.count(text) for text in dict.fromkeys(causes)}
        lines = [f"{count} room{'s' * (count > 1)} failed: {text}" for text, count in counts.items()][:_MAX_PROBLEMS]
        wrong = [mismatch for trial in every for mismatch in mismatches(trial)]
        return lines + [_mismatch_text(mismatch) for mismatch in wrong[:_MAX_PROBLEMS]]

    def best_roofline(self, kind: FloorKind) -> float | None:
        """Returns the highest measured limit of a kind in GB/s, because other load only lowers a measurement.

        None if this kind was not measured.
        """
        return max(self.roofline[kind], default=None)

    def trials(self) -> Mapping[Case, Sequence[TimedTrial]]:
        """Returns the trials of each case, with the cases in the plan's order of loads, paths and pipelines."""
        paths, pipelines = self.plan["paths"], self.plan["pipelines"]

        def order(case: Case) -> tuple[int, int, int, int]:
            pipeline = pipelines.index(case.pipeline) if case.pipeline in pipelines else -1
            busy = BUSY_ENGINES.index(case.busy_engine)
            return case.load, paths.index(case.path), pipeline, busy

        return {case: self._trials[case] for case in sorted(self._trials, key=order)}

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each case that ran, in the order of `trials`."""
        roofline = {kind: self.best_roofline(kind) for kind in ROOFLINES}
        row = partial(
            row_of,
            plan=self.plan,
            names=self.names,
            ready=self.ready,
            roofline=roofline,
            verified=self._verify != "off",
        )
        return [{**row(trials), "rounds": rounds_of(trials, row)} for trials in self.trials().values()]

    def lanes(self) -> list[str]:
        """Returns how the transport moves bytes, as the ranks describe it, such as the value of `UCX_TLS`."""
        described = [start.get("transport", {}).get("lanes", []) for start in self.ready.values()]
        return sorted({str(lane) for lanes in described for lane in ([lanes] if isinstance(lanes, str) else lanes)})

    def gpus(self) -> dict[int, Gpu]:
        """Returns the GPUs in use, by number."""
        found = {self.names[name]["device"]: start.get("gpu") for name, start in self.ready.items()}
        return {number: gpu for number, gpu in sorted(found.items()) if gpu is not None}


class Outcome:
    """Results of all fleets of a bench."""

    def __init__(self) -> None:
        self.measured: list[Results] = []

    @property
    def verified(self) -> bool | None:
        """Whether all rooms succeeded and every compared byte was correct; None if a fleet compared nothing."""
        verdicts = [each.verified for each in self.measured if each.trials()]
        return None if None in verdicts or not verdicts else all(verdicts)

    @property
    def problems(self) -> list[str]:
        """The lines of `Results.problems` of all fleets, with the fleet's name if there are several fleets."""
        several = len(self.measured) > 1
        return [
            f"{each.variant.label}: {line}" if several else line for each in self.measured for line in each.problems
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row per case of every fleet; rows of one load are adjacent, with deltas against the first row."""
        return with_delta([row for each in self.measured for row in self.rows_of(each)])

    def roofline(self) -> dict[str, dict[FloorKind, float | None]]:
        """Returns the highest measured limit of each kind in GB/s, by transport; None for kinds not measured."""
        found: dict[str, dict[FloorKind, float | None]] = {}
        for each in self.measured:
            best = found.setdefault(each.variant.request.transport, dict.fromkeys(ROOFLINES))
            for kind in ROOFLINES:
                figures = [figure for figure in (best[kind], each.best_roofline(kind)) if figure is not None]
                best[kind] = max(figures, default=None)
        return found

    def best_roofline(self, kind: FloorKind) -> float | None:
        """Returns the highest measured limit of a kind over all transports, in GB/s; None if it was not measured."""
        return max((figure for each in self.roofline().values() if (figure := each[kind]) is not None), default=None)

    def gpus(self) -> dict[int, Gpu]:
        """Returns the GPUs in use, by number; empty before the fleets have started."""
        return {number: gpu for each in self.measured for number, gpu in each.gpus().items()}

    def document(self) -> dict[str, Any]:
        """Returns the result as a JSON document with schema `SCHEMA`, as written by `--save`."""
        plan = self.measured[0].plan
        roofline = self.roofline()
        lanes = sorted({lane for each in self.measured for lane in each.lanes()})
        return {
            "schema": SCHEMA,
            "verified": self.verified,
            "shape": plan["shape"],
            "floors": {
                "memcpy_gb_per_s": self.best_roofline("memcpy"),
                "transport_write_gb_per_s": next(iter(roofline.values()))["write"],
                "write_gb_per_s_by_transport": {name: each["write"] for name, each in roofline.items()},
                "device_copy_gb_per_s": self.best_roofline("device"),
                "p2p_gb_per_s": self.best_roofline("peer"),
            },
            "runs": self.rows(),
            "env": fingerprint(plan["device"], lanes, self.gpus()),
        }

    def rows_of(self, each: Results) -> list[dict[str, Any]]:
        """Returns a row per case of a fleet, in the order of `Results.trials`."""
        request = each.variant.request
        layout = {
            "prefill": " + ".join(map(sizes_text, request.prefill)),
            "decode": sizes_text(request.decode),
            "cp_size": max(sizes.cp for sizes in request.prefill),
            "decode_ms": request.decode_ms,
        }
        return [{**row, **layout} for row in each.rows()]


def _mismatch_text(wrong: Mismatch) -> str:
    where = f"room {wrong['room']} {wrong['where']}" if wrong["room"] else wrong["where"]
    return f"{where}: expected {wrong['expected']}, found {wrong['found']} ({wrong['hint']})"
