"""The request for a fleet of synthetic ranks: model, instances, loads, transfer options; and the allowed values.

`kvctl bench`, `tune` and `demo` build a `PlanRequest`; `planner` turns it into a `Plan`. This module imports neither
numpy nor msgspec, because the commands' options use its constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from kvctl_agent.contract.choices import RANK0, STAGED
from kvctl_agent.errors import ConfigError

DTYPE_BYTES: dict[str, int] = {
    "fp8": 1,
    "int8": 1,
    "fp8-scaled": 1,
    "int8-scaled": 1,
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
}
"""Element types of a synthetic pool; only their size matters."""

DTYPE_SCALE_BYTES: dict[str, int] = {"fp8-scaled": 4, "int8-scaled": 4}
"""Bytes of quantisation scales per page and head, in separate buffers for K and for V."""

KINDS = ("mha", "mla")
STATE_KINDS = ("rows", "window", "pages")
"""Number of items of a state component per room: one; the pages of the last `window` tokens; all pages."""

VERIFY_MODES = ("full", "sample", "off")
PAGE_ORDERS = ("random", "contiguous")
PIPELINES = ("off", "on", "measured")
"""Pipeline modes; a decimal number of layers per group is allowed as well."""

STAGED_PATHS = (STAGED, "auto")
"""Paths on which parts may go through the decode rank's ring."""

DEVICES = ("cpu", "cuda")
"""Location of KV pools, staging buffers and rings."""

COMPUTES = ("sleep", "gpu")
"""Simulation of a forward: a sleep per layer, or matrix products and attention of the model's sizes."""

FloorKind = Literal["memcpy", "write", "device", "peer"]
"""Measured limit: one thread's memcpy, one write over the transport, a copy within the GPU or to the peer's GPU."""

Role = Literal["prefill", "decode"]
StateKind = Literal["rows", "window", "pages"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of one instance; `tp` is the attention TP size.

    `layers` are those of each pipeline stage; if empty, they are split evenly and the first stages take the remainder.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt lengths: `values` in turn or, if there are none, uniform over [low, high]."""

    values: tuple[int, ...] = ()
    low: int = 0
    high: int = 0

    @property
    def text(self) -> str:
        """The option's syntax: `1024`, `16,4096`, `256..2048`."""
        return ",".join(map(str, self.values)) if self.values else f"{self.low}..{self.high}"

    @property
    def mean(self) -> float:
        """Average prompt length."""
        return sum(self.values) / len(self.values) if self.values else (self.low + self.high) / 2

    @property
    def longest(self) -> int:
        """Maximum prompt length."""
        return max(self.values) if self.values else self.high


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a sweep: a number of rooms in flight, and prompt lengths unless the request lists its requests.

    `rooms` overrides the request's number of rooms for this point.
    """

    concurrency: int
    tokens: Tokens
    rooms: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace or of a conversation. Requests are listed by arrival, sessions turn by turn.

    Args:
        arrival_ms: arrival after the first request; ignored for the later turns of a session. None: closed loop, the
            request starts as soon as the window allows.
        prefix_tokens: tokens that the decode side has cached, page-aligned.
        output_tokens: tokens to decode; 0 skips decoding.
        session: requests of one session run one after the other on one decode dp group, each after the previous one has
            been decoded; -1: no session.
        decode_dp: decode dp group that has the prefix cached; -1: any. All requests have a group, or none.
    """

    arrival_ms: float | None
    tokens: int
    prefix_tokens: int = 0
    output_tokens: int = 0
    session: int = -1
    decode_dp: int = -1


@dataclass(frozen=True, slots=True)
class State:
    """One component of per-request state.

    Args:
        name: a word other than "kv" and "draft".
        layers: for each of its layers, the KV layer beside which it runs, ascending; determines the pipeline stage. If
            empty, one beside every KV layer.
        rows, heads, head_bytes: one item in one layer, over the whole model. `heads` is the axis that tp ranks split; 1
            if every rank holds all of it. For kinds "window" and "pages" an item is a page and `rows` counts per token.
        kind: one of `STATE_KINDS`.
        window: tokens, for kind "window".
    """

    name: str
    rows: int
    heads: int
    head_bytes: int
    layers: tuple[int, ...] = ()
    kind: StateKind = "rows"
    window: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All options that determine what a fleet moves; None selects the model's or the agent's default.

    Args:
        prefill: the prefill instances; all of them serve the one decode instance.
        memory_bytes: limit for all KV pools and rings together.
        kind: one of `KINDS`; with "mla" `head_dim` is the latent's, heads are 1 and there is no V.
        v_head_dim: if it differs from `head_dim`.
        k_scale_bytes, v_scale_bytes: quantisation scales per page and head.
        draft_layers: layers of a draft model, with `draft_heads` and `draft_dim` or the target's.
        states: replaces the model's components; an empty tuple removes them.
        pipelines, paths: alternatives to compare. A pipeline is one of `PIPELINES` or a number of layers per group.
        rate: requests per second with Poisson arrivals; 0: closed loop.
        requests: replaces drawn rooms in every load; the load's concurrency limits the rooms in flight.
        faults: specs of `kvctl.lab.faults.specification`, in force while rooms run.
        device: one of `DEVICES`.
        compute: one of `COMPUTES`; "gpu" replaces `layer_ms`.
        prefill_gpus, decode_gpus: GPUs that the ranks of a side share round-robin; by default the first half of the
            GPUs is for prefill and the rest for decode, or a single GPU for both.
        direct_sms: the agents' configuration key.
    """

    prefill: tuple[Sizes, ...]
    decode: Sizes
    loads: tuple[Load, ...]
    memory_bytes: int
    seed: int
    model: str | None = None
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    kind: str | None = None
    v_head_dim: int | None = None
    k_scale_bytes: int | None = None
    v_scale_bytes: int | None = None
    draft_layers: int | None = None
    draft_heads: int | None = None
    draft_dim: int | None = None
    states: tuple[State, ...] | None = None
    cp_mode: str = RANK0
    pipelines: tuple[str, ...] = ("off",)
    layer_ms: float = 0.0
    decode_ms: float = 0.0
    output_tokens: int = 0
    rate: float = 0.0
    requests: tuple[Request, ...] = ()
    page_size: int = 16
    page_order: str = "random"
    prefix_hit: float = 0.0
    rooms: int | None = None
    paths: tuple[str, ...] = ()
    transport: str = "nixl"
    ring_mb: int | None = None
    chunk_tokens: int | None = None
    workers: int | None = None
    faults: tuple[str, ...] = ()
    device: str = "cpu"
    compute: str = "sleep"
    prefill_gpus: tuple[int, ...] = ()
    decode_gpus: tuple[int, ...] = ()
    direct_sms: int | None = None


def choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Checks that an option has one of the allowed values.

    Raises:
        ConfigError: it does not; the message suggests the nearest allowed value.
    """
    if value not in allowed:
        near = get_close_matches(value, allowed, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{option} {value!r:.40} is unknown; {hint}allowed: {', '.join(allowed)}")
