"""Measures kvctl beside SGLang's own transfer classes on this host, and writes the comparison as Markdown and JSON.

Each work is run by both sides in turns (SGLang, ours, SGLang, ours, ...), each time in new processes; the table has the
medians. Ours is `kvctl bench`. SGLang's side is a harness that drives its unmodified classes without an engine:
`make peer HARNESS=DIR` installs it into a folder of its own, with a venv. Without it only our side is measured.

    python benchmarks/side_by_side.py --peer DIR
    python benchmarks/side_by_side.py --rows tp4-tp4,small-tp1-tp1 --rounds 1
    python benchmarks/side_by_side.py --peer DIR --device cuda --prefill-gpus 0,1 --decode-gpus 2,3
    python benchmarks/side_by_side.py --peer DIR --device all --prefill-gpus 0 --decode-gpus 1 --seconds 300

All works are run once before any is run again, and the files are written after every run: whenever the time is up, or
on Ctrl-C, every row has about as many rounds as the others. Only runs whose bytes were all correct count: `kvctl bench`
compares every room, the harness the pages of the last room in each place of its pools.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvctl.lab.bench.statistics import times_text

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "kvctl.side-by-side/1"
# The goals differ between a small host, where ranks share cores, and a server.
SMALL_HOST_CORES = 16
# Time that the first run of a work needs at least: processes start and pools are filled.
_LEAST_S = 8.0
_RUN_LIMIT_S = 240.0
_STOP_S = 10.0

Device = Literal["cpu", "cuda"]
Side = Literal["peer", "ours"]
Figures = dict[str, float]


@dataclass(frozen=True)
class Work:
    """A load that both sides run: llama-3.1-8b in bf16 (128 KiB a token), pages of 16 tokens in random order.

    Attributes:
        decode_dp: independent decode groups of one rank each; 1 with `decode_tp` ranks in one group.
        path: path of our side.
        options: further options of `kvctl bench`.
        note: what they mean; "" without any. Only our side can measure them, except `--busy-engine`.
    """

    name: str
    tokens: int
    in_flight: int
    rooms: int
    prefill_tp: int = 4
    decode_tp: int = 1
    decode_dp: int = 1
    device: Device = "cpu"
    path: str = "auto"
    options: tuple[str, ...] = ()
    note: str = ""
    observed: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks that take part in one room."""
        return self.prefill_tp + self.decode_tp

    @property
    def busy_engine(self) -> bool:
        """Whether the engine's thread runs Python."""
        return "--busy-engine" in self.options

    @property
    def text(self) -> str:
        decode = f"DP{self.decode_dp}" if self.decode_dp > 1 else f"TP{self.decode_tp}"
        load = "one at a time" if self.in_flight == 1 else f"{self.in_flight} in flight"
        where = "GPUs, " if self.device == "cuda" else ""
        path = "" if self.path == "auto" else f", {self.path}"
        return f"{where}TP{self.prefill_tp} → {decode}, {self.tokens:,} tokens, {self.note or load}{path}"

    def our_options(self, prefill_gpus: str, decode_gpus: str) -> list[str]:
        """Returns the options of `kvctl bench`."""
        sizes = ["--prefill-tp", f"{self.prefill_tp}", "--decode-tp", f"{self.decode_tp}"]
        sizes += ["--decode-dp", f"{self.decode_dp}", "--tokens", f"{self.tokens}", "--rooms", f"{self.rooms}"]
        gpus = ["--device", "cuda", "--prefill-gpus", prefill_gpus, "--decode-gpus", decode_gpus]
        return [
            *sizes,
            *("--concurrency", f"{self.in_flight}", "--path", self.path),
            *(gpus if self.device == "cuda" else []),
            *self.options,
        ]

    def peer_options(self, prefill_gpus: str, decode_gpus: str) -> list[str]:
        """Returns the options of the harness; SGLang stages where the layouts differ."""
        sizes = ["--prefill-tp", f"{self.prefill_tp}", "--decode-tp", f"{self.decode_tp}"]
        sizes += ["--decode-dp", f"{self.decode_dp}", "--tokens", f"{self.tokens}", "--rooms", f"{self.rooms}"]
        gpus = ["--device", "cuda", "--prefill-gpus", prefill_gpus, "--decode-gpus", decode_gpus]
        return [
            *sizes,
            *("--concurrency", f"{self.in_flight}", "--page", "16"),
            *(gpus if self.device == "cuda" else []),
            *(["--staging"] if self.prefill_tp != self.decode_tp else []),
        ]


class Goal(NamedTuple):
    """A bound of what our side reaches.

    Attributes:
        of: what the bound is a multiple of: SGLang's figure, the rate of one copy between GPUs, or nothing.
    """

    sign: Literal["≥", "≤"]
    bound: float
    of: Literal["peer", "copy", "value"] = "peer"

    def met(self, ours: float, peer: float | None, copy: float | None) -> bool | None:
        """Returns whether the goal is met; None if what it is compared with was not measured."""
        unit = {"peer": peer, "copy": copy, "value": 1.0}[self.of]
        if not unit:
            return None
        return ours / unit >= self.bound if self.sign == "≥" else ours / unit <= self.bound


class Metric(NamedTuple):
    """A figure of a run.

    Attributes:
        key: its key in `Figures`.
        show: format of a value, with what it is.
        bound: format of a goal that is a multiple of nothing.
    """

    key: str
    show: str
    bound: str = ""


GB_PER_S = Metric("gb_per_s", "{:.3g} GB/s")
ROOMS_PER_S = Metric("rooms_per_s", "{:,.4g} rooms/s")
P50 = Metric("p50_ms", "p50 {:.2f} ms")
CPU = Metric("cpu_ms", "CPU a room and rank: {:.2f} ms", "{:g} ms")
OBSERVED = Metric("observer_cost", "cost of observers: {:.1%}", "{:.0%}")
SERVED = Metric("served_rooms_per_s", "{:.1f} rooms/s served", "{:g}")
SERVED_RATIO = Metric("served_ratio", "{:.2f} of the rooms served beside an idle engine", "{:g}")
SLOWDOWN = Metric("engine_slowdown", "engine {:.1%} slower", "{:.0%}")
STALL = Metric("engine_stall_ms", "engine's longest stall {:.2f} ms", "{:g} ms")


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        goal: the goal on a server or with GPUs; None if there is none.
        small_goal: the goal on a host of few cores.
    """

    name: str
    work: Work
    metric: Metric
    goal: Goal | None
    small_goal: Goal | None = None

    def goal_on(self, cores: int) -> Goal | None:
        return self.small_goal if self.work.device == "cpu" and cores < SMALL_HOST_CORES else self.goal


_SMALL = Work("small-tp4-dp4", tokens=16, in_flight=4, rooms=200, decode_dp=4)
_SMALL_EQUAL = Work("small-tp4-tp4", tokens=16, in_flight=4, rooms=200, decode_tp=4)
_GPU_SMALL = Work("gpu-small-tp4-dp4", tokens=16, in_flight=8, rooms=400, decode_dp=4, device="cuda")
_OBSERVED = Work(
    "observer",
    tokens=1024,
    in_flight=4,
    rooms=50,
    decode_dp=4,
    path="staged",
    note="beside `kvctl top` and `kvctl status -w 0.1`",
    observed=True,
)


_OBSERVERS = ("top", "status -w 0.1 -o jsonl")
_BUSY_RATE = "50"


def _busy(name: str, path: str, rooms: int, device: Device = "cpu") -> Work:
    options = ("--rate", _BUSY_RATE, "--busy-engine", "off,prefill")
    note = f"{_BUSY_RATE} rooms/s asked, busy prefill engine"
    return Work(name, 1024, 8, rooms, prefill_tp=1, device=device, path=path, options=options, note=note)


_BUSY_STAGED = _busy("busy-staged", "staged", 100)
_BUSY_BULK = _busy("busy-bulk", "bulk", 100)
_GPU_BUSY = _busy("gpu-busy", "direct", 250, "cuda")

ROWS = (
    Row(
        "tp4-tp4",
        Work("tp4-tp4", tokens=1024, in_flight=4, rooms=48, decode_tp=4),
        GB_PER_S,
        Goal("≥", 1.5),
        Goal("≥", 3),
    ),
    Row(
        "tp1-tp1",
        Work("tp1-tp1", tokens=1024, in_flight=4, rooms=48, prefill_tp=1),
        GB_PER_S,
        Goal("≥", 2),
        Goal("≥", 2),
    ),
    Row(
        "tp4-dp4",
        Work("tp4-dp4", tokens=1024, in_flight=4, rooms=48, decode_dp=4, path="staged"),
        GB_PER_S,
        Goal("≥", 6),
    ),
    Row(
        "small-tp1-tp1",
        Work("small-tp1-tp1", tokens=16, in_flight=1, rooms=200, prefill_tp=1),
        P50,
        Goal("≤", 0.5),
    ),
    Row("small-tp4-dp4", _SMALL, ROOMS_PER_S, Goal("≥", 10), Goal("≥", 12)),
    Row("small-tp4-dp4-cpu", _SMALL, CPU, Goal("≤", 0.4, "value"), Goal("≤", 0.4, "value")),
    Row("small-tp4-tp4", _SMALL_EQUAL, ROOMS_PER_S, None),
    Row("small-tp4-tp4-cpu", _SMALL_EQUAL, CPU, None),
    Row("observer", _OBSERVED, OBSERVED, Goal("≤", 0.02, "value"), Goal("≤", 0.02, "value")),
    Row("busy-staged-served", _BUSY_STAGED, SERVED_RATIO, Goal("≥", 0.8, "value"), Goal("≥", 0.8, "value")),
    Row("busy-staged-slowdown", _BUSY_STAGED, SLOWDOWN, None),
    Row("busy-staged-stall", _BUSY_STAGED, STALL, Goal("≤", 2, "value"), Goal("≤", 2, "value")),
    Row("busy-bulk-slowdown", _BUSY_BULK, SLOWDOWN, None),
    Row("busy-bulk-stall", _BUSY_BULK, STALL, Goal("≤", 2, "value"), Goal("≤", 2, "value")),
    Row(
        "gpu-tp4-dp4",
        Work("gpu-tp4-dp4", tokens=1024, in_flight=8, rooms=256, decode_dp=4, device="cuda"),
        GB_PER_S,
        Goal("≥", 5),
    ),
    Row(
        "gpu-tp4-dp4-alone",
        Work("gpu-tp4-dp4-alone", tokens=1024, in_flight=1, rooms=100, decode_dp=4, device="cuda"),
        P50,
        Goal("≤", 1 / 6),
    ),
    Row(
        "gpu-tp1-tp1",
        Work("gpu-tp1-tp1", tokens=1024, in_flight=8, rooms=256, prefill_tp=1, device="cuda"),
        GB_PER_S,
        Goal("≥", 0.85, "copy"),
    ),
    Row("gpu-small-tp4-dp4", _GPU_SMALL, ROOMS_PER_S, Goal("≥", 6)),
    Row("gpu-small-tp4-dp4-cpu", _GPU_SMALL, CPU, Goal("≤", 0.4, "value")),
    # Arrivals are random, so that about 50 come.
    Row("gpu-busy-served", _GPU_BUSY, SERVED, Goal("≥", 49, "value")),
    Row("gpu-busy-slowdown", _GPU_BUSY, SLOWDOWN, Goal("≤", 0.03, "value")),
    Row("gpu-busy-stall", _GPU_BUSY, STALL, Goal("≤", 1, "value")),
)


class RunFailed(Exception):
    """A run has no result that counts."""


# ---- running -------------------------------------------------------------------------------------------------------


def ours(work: Work, options: argparse.Namespace, limit_s: float) -> tuple[Figures, dict[str, Any]]:
    """Runs a work with `kvctl bench`, alone and then observed if the work says so.

    Returns:
        The figures of the run alone and the saved document.

    Raises:
        RunFailed: it did not end, failed, or received wrong bytes.
    """
    figures, document = _bench(work, options, limit_s / (1 + work.observed))
    if work.observed:
        observed, _ = _bench(work, options, limit_s / 2, observers=_OBSERVERS)
        figures |= {"observer_cost": 1 - observed["gb_per_s"] / figures["gb_per_s"]}
    return figures, document


def _bench(
    work: Work, options: argparse.Namespace, limit_s: float, observers: Sequence[str] = ()
) -> tuple[dict[str, float], dict[str, Any]]:
    """Runs `kvctl bench` beside these commands, which are ended with it; raises as `ours`."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder, contextlib.ExitStack() as stack:
        environment = {"KVCTL_SOCKET_DIR": folder}
        for each in observers:
            observer = subprocess.Popen(
                ["script", "-qec", f"{sys.executable} -m kvctl {each}", "/dev/null"],  # on a terminal of its own
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment},
            )
            stack.callback(observer.wait)
            stack.callback(observer.terminate)
        save = Path(folder) / "bench.json"
        words = work.our_options(options.prefill_gpus, options.decode_gpus)
        command = [sys.executable, "-m", "kvctl", "bench", *words, "--save", str(save), "-o", "table"]
        _run(command, environment, limit_s)
        document = json.loads(save.read_bytes())
    if document["verified"] is not True:
        raise RunFailed("not every byte was verified")
    run = document["runs"][-1]
    figures = {
        "gb_per_s": run["gb_per_s"],
        "rooms_per_s": run["rooms_per_s"],
        "p50_ms": run["latency_ms"]["p50"],
        "cpu_ms": run["cpu_seconds"] * 1e3 / run["ok"] / work.ranks,
    }
    if work.busy_engine:
        figures |= {
            "served_rooms_per_s": run["served_rooms_per_s"],
            "served_ratio": run["served_rooms_per_s"] / document["runs"][0]["served_rooms_per_s"],
            "engine_slowdown": run["engine_slowdown_ratio"],
            "engine_stall_ms": run["engine_stall_ms"],
        }
    return figures, document


def peer(work: Work, options: argparse.Namespace, limit_s: float) -> Figures:
    """Runs a work with SGLang's classes; returns its figures.

    Raises:
        RunFailed: it did not end, failed, or received wrong bytes.
    """
    words = work.peer_options(options.prefill_gpus, options.decode_gpus)
    if work.busy_engine:
        return _busy_peer(words, options.peer, limit_s)
    harness = [_peer_python(options.peer), "-W", "ignore", str(options.peer / "sglang_pd.py"), *words]
    out = _run(harness, {"SGLANG_SRC": str(options.peer / "src")}, limit_s)
    run = json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
    if run["bad"] or not run["checked"]:
        raise RunFailed(f"{run['bad']} of {run['checked']} compared elements are wrong")
    return {
        "gb_per_s": run["GB_s"],
        "rooms_per_s": run["rooms_s"],
        "p50_ms": run["lat_ms_p50"],
        "cpu_ms": (run["cpu_P_s"] + run["cpu_D_s"]) * 1e3 / run["rooms"] / work.ranks,
    }


def _busy_peer(words: Sequence[str], folder: Path, limit_s: float) -> Figures:
    """Runs SGLang's classes beside an idle and a busy engine thread; returns the figures of the latter."""
    command = [sys.executable, str(ROOT / "benchmarks" / "busy_engine_peer.py"), "--peer", str(folder)]
    idle, busy = (
        json.loads(_run([*command, "--rate", _BUSY_RATE, *more, "--", *words], {}, limit_s / 2))
        for more in (["--idle"], [])
    )
    if not idle["verified"] or not busy["verified"]:
        raise RunFailed("not every byte was verified")
    return {
        "p50_ms": busy["latency_ms"]["p50"],
        "served_rooms_per_s": busy["served_rooms_per_s"],
        "served_ratio": busy["served_rooms_per_s"] / idle["served_rooms_per_s"],
        "engine_slowdown": busy["engine_slowdown_ratio"],
        "engine_stall_ms": busy["engine_stall_ms"],
    }


def _peer_python(folder: Path) -> str:
    """Returns the interpreter of the peer's venv, or ours if the folder has none (a host that has its packages)."""
    python = folder / "venv" / "bin" / "python"
    return str(python) if python.exists() else sys.executable


def _run(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Runs a command in a process group of its own; returns its stdout.

    Raises:
        RunFailed: it failed or did not end in time; it is interrupted, then killed, with all its children.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    # Without bytecode each of the many processes would compile all that it imports.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, "PYTHONPATH": path, **environment},
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit_s)
        except BaseException as error:
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=_STOP_S)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunFailed(f"did not end within {limit_s:.0f} s") from None
            raise
    if process.returncode:
        last = " / ".join((out + errors).strip().splitlines()[-3:])
        raise RunFailed(f"exit code {process.returncode}: {last}")
    return out


class Comparison:
    """Runs the works of the selected rows, and keeps the document that is saved.

    Args:
        options: The parsed command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rows = [row for name in options.rows for row in ROWS if row.name == name]
        self._ends = time.monotonic() + options.seconds
        self._took_s: dict[tuple[Work, Side], float] = {}
        self.failed = False
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": options.commit,
            "cores": len(os.sched_getaffinity(0)),
            "env": {},
            "peer": peer_versions(options.peer),
            "rounds": options.rounds,
            "rows": [row.name for row in self._rows],
            "floors": {},
            "works": {},
            "notes": [] if options.peer else ["SGLang's side was not measured: no --peer"],
        }

    def run(self) -> None:
        """Runs all rounds; ends early, with a note, when the time is up or on SIGINT or SIGTERM."""
        try:
            with _interruptible():
                for number in range(1, self._options.rounds + 1):
                    for work in dict.fromkeys(row.work for row in self._rows):
                        self._measure(work, number)
        except KeyboardInterrupt:
            self._note("interrupted")
        self._save()

    def _measure(self, work: Work, number: int) -> None:
        for side in ("peer", "ours"):
            if side == "ours" or (self._options.peer and (work.busy_engine or not work.note)):
                self._measure_side(work, side, number)
        for row in self._rows:
            if row.work == work:
                print(f"round {number}  {row.name:22} {' | '.join(cells(row, self.document))}", flush=True)

    def _measure_side(self, work: Work, side: Side, number: int) -> None:
        left_s = self._ends - time.monotonic()
        if left_s < self._took_s.get((work, side), _LEAST_S):
            self._note(f"{work.name}, {_NAMES[side]}, round {number}: not run, {max(0.0, left_s):.0f} s were left")
            return
        limit_s = min(left_s, _RUN_LIMIT_S)
        started = time.monotonic()
        try:
            if side == "ours":
                figures, document = ours(work, self._options, limit_s)
                self._add_floors(work.device, document)
            else:
                figures = peer(work, self._options, limit_s)
        except RunFailed as error:
            self.failed = True
            self._note(f"{work.name}, {_NAMES[side]}, round {number}: {error}")
            return
        self._took_s[work, side] = time.monotonic() - started
        entry = self.document["works"].setdefault(work.name, {"work": work.text, "peer": [], "ours": []})
        entry[side].append(figures)
        self._save()

    def _add_floors(self, device: Device, document: Mapping[str, Any]) -> None:
        """Keeps the highest measured limits, because other load only lowers them."""
        best = self.document["floors"].setdefault(device, {})
        for key in FLOORS:
            if value := document["floors"][key]:
                best[key] = max(value, best.get(key, 0.0))
        if device == "cuda" or not self.document["env"]:
            self.document["env"] = {name: value for name, value in document["env"].items() if name in _ENVIRONMENT}

    def _note(self, text: str) -> None:
        print(text, flush=True)
        self.document["notes"].append(text)

    def _save(self) -> None:
        out: Path = self._options.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "side_by_side.json").write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")
        (out / "side_by_side.md").write_text(markdown(self.document) + "\n", encoding="utf-8")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt, as SIGINT does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- the table -----------------------------------------------------------------------------------------------------

FLOORS = {
    "memcpy_gb_per_s": "memcpy on one thread",
    "transport_write_gb_per_s": "one write over NIXL",
    "device_copy_gb_per_s": "one copy within a GPU",
    "p2p_gb_per_s": "one copy between two GPUs",
}
HEADER = ("work", "SGLang", "ours", "ours / SGLang", "goal", "met")
_NAMES: dict[Side, str] = {"peer": "SGLang", "ours": "ours"}
_DEVICES: dict[Device, str] = {"cpu": "host memory", "cuda": "GPUs"}
_ENVIRONMENT = ("kvctl", "python", "torch", "triton", "nixl", "cpu", "device", "driver", "cuda")


def cells(row: Row, document: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a row, in the order of `HEADER`; "-" for what was not measured."""
    entry = document["works"].get(row.work.name, {})
    theirs, mine = ([run[row.metric.key] for run in entry.get(side, ())] for side in ("peer", "ours"))
    goal = row.goal_on(document["cores"])
    copy = document["floors"].get(row.work.device, {}).get("p2p_gb_per_s")
    met = {goal.met(ours, peer, copy) for ours in mine for peer in theirs or [None]} if goal else {None}
    shown = [_runs_text(row.metric, runs) for runs in (theirs, mine)]
    if goal and goal.of == "copy" and mine and copy:
        shown[1] += f", {statistics.median(mine) / copy:.2f} of one copy"
    return [
        row.work.text,
        *shown,
        times_text(mine, theirs),
        _goal_text(row, goal),
        "-" if met <= {None} else "in some runs" if len(met) > 1 else "yes" if met == {True} else "**no**",
    ]


def _runs_text(metric: Metric, runs: Sequence[float]) -> str:
    """Formats the median of the runs, with the lowest and the highest one."""
    if not runs:
        return "-"
    text = metric.show.format(statistics.median(runs))
    ends = f"{min(runs):.3g} to {max(runs):.3g}"
    return f"{text} ({ends})" if len(runs) > 1 and "%" not in metric.show else text


def _goal_text(row: Row, goal: Goal | None) -> str:
    if goal is None:
        return "-"
    bounds = {"peer": f"{goal.bound:.2g} x", "copy": f"{goal.bound:g} of one copy"}
    return f"{goal.sign} {bounds.get(goal.of) or row.metric.bound.format(goal.bound)}"


def _range(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"


def markdown(document: Mapping[str, Any]) -> str:
    """Returns the comparison as Markdown: the host and versions, the table, the limits of the run, and notes."""
    env, theirs = document["env"], document["peer"]
    rows = [row for row in ROWS if row.name in document["rows"]]
    devices = [device for device in _DEVICES if device in document["floors"]]
    gpus = f", {env['device']} (driver {env['driver']}, CUDA {env['cuda']})" if "cuda" in devices else ""
    counts = [len(runs) for work in document["works"].values() for side in _NAMES if (runs := work[side])] or [0]
    versions = [f"{name} {env[name]}" for name in ("kvctl", "python", "torch", "triton", "nixl") if env.get(name)]
    lines = [
        f"{document['cores']} cores, {env.get('cpu', platform.machine())}{gpus}; {document['at']}; "
        f"commit {document['commit']}; {', '.join(versions)}. "
        + (f"SGLang {theirs.pop('sglang')} with " if (theirs := dict(theirs)) else "")
        + ", ".join(f"{name} {version}" for name, version in theirs.items())
        + (". " if theirs else "")
        + f"Medians of {_range(counts)} interleaved runs (lowest to highest; ≈: they overlap), every byte verified.",
        "",
        f"| {' | '.join(HEADER)} |",
        "|" + " --- |" * len(HEADER),
    ]
    lines += [f"| {' | '.join(cells(row, document))} |" for row in rows]
    for device in devices:
        limits = [f"{FLOORS[key]} {value:,.4g} GB/s" for key, value in document["floors"][device].items()]
        lines += ["", f"Limits in the same run, {_DEVICES[device]}: {', '.join(limits)}."]
    if document["notes"]:
        lines += ["", f"Left out: {'; '.join(document['notes'])}."]
    return "\n".join(lines)


# ---- the command line ----------------------------------------------------------------------------------------------


def peer_versions(folder: Path | None) -> dict[str, str]:
    """Returns the versions of SGLang and of what it runs on; empty without a harness."""
    if folder is None:
        return {}
    found = next(folder.glob("src/sglang-*.dist-info"), None)
    asked = "import importlib.metadata as m; print(m.version('torch'), m.version('nixl'))"
    command = [_peer_python(folder), "-c", asked]
    torch, nixl = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return {
        "sglang": found.name.removeprefix("sglang-").removesuffix(".dist-info") if found else "unknown",
        "torch": torch,
        "nixl": nixl,
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = os.environ.get("SIDE_BY_SIDE_PEER")
    parser.add_argument(
        "--peer",
        type=Path,
        default=Path(installed) if installed else None,
        help="folder with sglang_pd.py, src/ and, unless this Python has its packages, venv/ [SIDE_BY_SIDE_PEER]",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "all"), default="cpu", help="rows of host memory, of GPUs")
    parser.add_argument("--prefill-gpus", default="0", help="GPU numbers that prefill ranks take in turn")
    parser.add_argument("--decode-gpus", default="1", help="the same for decode ranks")
    parser.add_argument(
        "--rows", default="", help="names of rows in the order to run them, with commas; all of --device by default"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each work on each side")
    parser.add_argument("--seconds", type=float, default=1800.0, help="time for everything together")
    parser.add_argument("--out", type=Path, default=Path("side-by-side"), help="folder for results")
    parser.add_argument("--commit", default=_commit(), help="commit that is measured, where there is no repository")
    options = parser.parse_args(arguments)
    names = [row.name for row in ROWS if options.device in ("all", row.work.device)]
    if unknown := set(filter(None, options.rows.split(","))) - {*names}:
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    options.rows = options.rows.split(",") if options.rows else names
    if options.peer and not (options.peer / "sglang_pd.py").exists():
        parser.error(f"no sglang_pd.py in {options.peer}: install it with make peer HARNESS=DIR")
    if options.device != "cpu" and not Path("/proc/driver/nvidia/version").exists():
        parser.error("no NVIDIA driver here: --device cpu")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 0 unless a run failed or received wrong bytes."""
    options = _options(arguments)
    comparison = Comparison(options)
    comparison.run()
    print(f"\n{markdown(comparison.document)}\n\nsaved in {options.out}: side_by_side.md, side_by_side.json")
    return int(comparison.failed)


if __name__ == "__main__":
    sys.exit(main())
