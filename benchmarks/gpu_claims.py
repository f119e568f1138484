"""Declares the claims about `kvctl bench` on GPUs: the commands that measure them, and the bound of each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Document = Mapping[str, Any]
"""What `kvctl bench --save` writes."""


@dataclass(frozen=True)
class Claim:
    """Claim about a result: a figure and its bound; a figure without a bound is only printed.

    Attributes:
        text: the claim, for the table.
        measure: computes the figure; returns None if the result does not contain it.
        at_least: smallest value for which the claim holds.
        at_most: largest value for which the claim holds.
        show: format string of the figure.
    """

    text: str
    measure: Callable[[Document], float | None]
    at_least: float | None = None
    at_most: float | None = None
    show: str = "{:.2f}"

    @property
    def target(self) -> str:
        """The bound as text; "shown" if there is none."""
        if self.at_least is not None:
            return f"at least {self.show.format(self.at_least)}"
        return "shown" if self.at_most is None else f"at most {self.show.format(self.at_most)}"

    def holds(self, value: float) -> bool:
        """Returns whether a figure is within the bound."""
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True)
class Bench:
    """One call of `kvctl bench`, and the claims about its result.

    Attributes:
        options: command-line options, without those that select the devices.
        tiny: sizes that replace those of `options` in a rehearsal on a machine without GPUs.
        least_s: seconds that must remain for the call to be started.
        environment: additional environment variables of the call.
    """

    name: str
    options: str
    claims: tuple[Claim, ...]
    tiny: str
    least_s: float = 40.0
    environment: Mapping[str, str] = field(default_factory=dict)


def runs(document: Document, **wanted: object) -> list[Mapping[str, Any]]:
    """Returns the runs of a result whose fields have the values `wanted`."""
    return [run for run in document["runs"] if all(run.get(name) == value for name, value in wanted.items())]


def figure(document: Document, name: str, **wanted: object) -> float | None:
    """Returns a figure of the only run whose fields have the values `wanted`; None if there is not exactly one."""
    found = runs(document, **wanted)
    value: float | None = found[0].get(name) if len(found) == 1 else None
    return value


def over(name: str, path: str, base: str) -> Callable[[Document], float | None]:
    """Returns a function that computes the ratio of a figure on path `path` to the same figure on path `base`."""

    def measure(document: Document) -> float | None:
        value, against = figure(document, name, path=path), figure(document, name, path=base)
        return value / against if value is not None and against else None

    return measure


def of(name: str, **wanted: object) -> Callable[[Document], float | None]:
    """Returns a function that reads a figure of the run whose fields have the values `wanted`."""
    return lambda document: figure(document, name, **wanted)


def auto_of_best(document: Document) -> float | None:
    """Returns the throughput of path `auto` divided by that of the best fixed path; None if either was not measured.

    The throughput of a path that `auto` chose is that of the path: the rounds do not tell them apart.
    """
    same = next((run.get("same_as") for run in runs(document, path="auto")), None)
    auto = figure(document, "gb_per_s", path=same["path"] if same else "auto")
    fixed = [run["gb_per_s"] for run in document["runs"] if run["path"] != "auto"]
    return auto / max(fixed) if auto is not None and fixed else None


def ttft_at(concurrency: int, path: str, base: str) -> Callable[[Document], float | None]:
    """Returns a function that computes the ratio of the mean time to first token (TTFT) on one path to that on another.

    Args:
        concurrency: number of rooms in flight of the compared runs.
        path: path of the numerator.
        base: path of the denominator.
    """

    def measure(document: Document) -> float | None:
        means = [
            found[0]["ttft_ms"]["mean"] if (found := runs(document, path=each, concurrency=concurrency)) else None
            for each in (path, base)
        ]
        return means[0] / means[1] if means[0] is not None and means[1] else None

    return measure


def pipelined(document: Document) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yields pairs of runs that differ only in layer pipelining: off, then on."""
    for off in runs(document, pipeline="off"):
        on = runs(document, pipeline="on", path=off["path"], tokens=off["tokens"], concurrency=off["concurrency"])
        if len(on) == 1 and all(each["ttft_ms"]["mean"] for each in (off, on[0])):
            yield off, on[0]


def _gain(off: Mapping[str, Any], on: Mapping[str, Any]) -> float:
    return float(on["ttft_ms"]["mean"] / off["ttft_ms"]["mean"] - 1)


def ttft_where_even(document: Document) -> float | None:
    """Returns the relative change of TTFT through pipelining (-0.4: 40 % less) where transfer takes as long as compute.

    Of the pipelined runs, the one whose transfer time is closest to its compute time counts; None without such runs.
    """
    pairs = [
        (off, on)
        for off, on in pipelined(document)
        if on["groups"] > 1 and off["compute_ms"]["p50"] and off["exposed_ms"]["p50"]
    ]
    if not pairs:
        return None

    def uneven(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> float:
        ratio: float = pair[0]["exposed_ms"]["p50"] / pair[0]["compute_ms"]["p50"]
        return max(ratio, 1 / ratio)

    return _gain(*min(pairs, key=uneven))


def worst_ttft(document: Document) -> float | None:
    """Returns the largest relative change of TTFT through pipelining (0.01: 1 % more), over all lengths and paths."""
    return max((_gain(*pair) for pair in pipelined(document)), default=None)


_PERCENT = "{:+.1%}"
_TIMES = "{:.2f} x"
_BIG = "--model llama-3.1-70b --page-size 16 --page-order random"
_TINY = "--layers 2 --kv-heads 4 --head-dim 16 --page-size 16"
_SWEEP = (
    "--model qwen2.5-72b --pipeline off,on --layer-ms 3 --concurrency 1 --rooms 8 "
    "--sweep tokens=1024,2048,4096,8192,16384"
)
_TINY_SWEEP = "--model llama-3.1-8b --layers 4 --kv-heads 2 --head-dim 16 --path staged --pipeline off,on --layer-ms 1"


def _equal(page_size: int) -> Bench:
    return Bench(
        f"equal-page-{page_size}",
        f"--model llama-3.1-70b --prefill-tp 4 --decode-tp 4 --page-size {page_size} --page-order random "
        f"--tokens 1024 --path bulk,staged,direct,auto --concurrency 1 --rooms 12 --point-seconds 6",
        (
            Claim(
                f"TP4 to TP4, page {page_size}: auto against bulk",
                over("gb_per_s", "auto", "bulk"),
                at_least=20,
                show=_TIMES,
            ),
            Claim(f"TP4 to TP4, page {page_size}: auto of the best path", auto_of_best, at_least=0.95),
        ),
        f"{_TINY} --prefill-tp 2 --decode-tp 2 --tokens 64 --path bulk,staged,auto --rooms 4",
    )


def _pipelined(name: str, transport: str, paths: str, *claims: Claim, **environment: str) -> Bench:
    return Bench(
        name,
        f"{_SWEEP} --transport {transport} --path {paths} --point-seconds 4",
        claims,
        f"{_TINY_SWEEP} --tokens 1024 --rooms 2",
        60.0,
        environment,
    )


def benches(slow: str) -> Sequence[Bench]:
    """Returns the benches to run, the most important first.

    Args:
        slow: the slow transport: "mooncake" (over TCP) or "ucx-tcp" (NIXL without cuda_ipc, through the host).
    """
    transport = "mooncake" if slow == "mooncake" else "nixl"
    environment = {} if slow == "mooncake" else {"UCX_TLS": "tcp,cuda_copy"}
    return (
        Bench(
            "unequal-1024",
            f"{_BIG} --prefill-tp 4 --decode-tp 1 --tokens 1024 --path slice,staged,direct,auto --concurrency 1 "
            "--rooms 24 --point-seconds 8",
            (
                Claim(
                    "TP4 to TP1: staged against slice", over("gb_per_s", "staged", "slice"), at_least=100, show=_TIMES
                ),
                Claim(
                    "TP4 to TP1: staged, latency of the floor",
                    of("floor_ratio", path="staged"),
                    at_most=1.6,
                    show=_TIMES,
                ),
                Claim(
                    "TP4 to TP1: direct, latency of the floor",
                    of("floor_ratio", path="direct"),
                    at_most=1.2,
                    show=_TIMES,
                ),
                Claim("TP4 to TP1: auto of the best path", auto_of_best, at_least=0.95),
            ),
            f"{_TINY} --prefill-tp 4 --decode-tp 1 --tokens 64 --path slice,staged,auto --rooms 4",
        ),
        Bench(
            "direct-4096",
            f"{_BIG} --prefill-tp 4 --decode-tp 1 --tokens 4096 --path staged,direct --concurrency 8 --rooms 48",
            (Claim("TP4 to TP1, 4,096 tokens: direct, of a copy", of("p2p_ratio", path="direct"), at_least=0.88),),
            f"{_TINY} --prefill-tp 4 --decode-tp 1 --tokens 128 --path staged --rooms 4",
        ),
        Bench(
            "one-writer",
            f"{_BIG} --prefill-tp 1 --decode-tp 1 --tokens 4096 --path staged,direct --concurrency 4 --rooms 40",
            (Claim("TP1 to TP1, a GPU each, 4,096: direct, of a copy", of("p2p_ratio", path="direct"), at_least=0.88),),
            f"{_TINY} --prefill-tp 1 --decode-tp 1 --tokens 128 --path staged --rooms 4",
        ),
        _equal(16),
        _equal(64),
        Bench(
            "staging-sweep",
            "--prefill-tp 4 --decode-dp 4 --path slice,staged,direct --sweep concurrency=1..1024 --point-seconds 5",
            (
                Claim("staging sweep at 512: TTFT, staged of slice", ttft_at(512, "staged", "slice"), at_most=0.1),
                Claim("staging sweep at 512: TTFT, direct of slice", ttft_at(512, "direct", "slice")),
            ),
            f"{_TINY} --prefill-tp 4 --decode-dp 4 --path slice,staged --sweep concurrency=1,2 --rooms 2 --tokens 64",
            90.0,
        ),
        _pipelined(
            "pipeline-fast",
            "nixl",
            "staged,direct",
            Claim("pipelined on the fast lane: TTFT at worst", worst_ttft, at_most=0.01, show=_PERCENT),
        ),
        _pipelined(
            "pipeline-slow",
            transport,
            "staged",
            Claim(f"pipelined over {slow}: TTFT where T is about C", ttft_where_even, at_most=-0.4, show=_PERCENT),
            Claim(f"pipelined over {slow}: TTFT at worst", worst_ttft, show=_PERCENT),
            **environment,
        ),
    )
