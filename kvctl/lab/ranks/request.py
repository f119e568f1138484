"""Data types and allowed values of a request for a fleet: model, instances, loads and transfer options.

`kvctl bench`, `tune` and `demo` build a `PlanRequest`; `planner` turns it into a `Plan`. This module imports neither
numpy nor msgspec, because the definitions of command-line options import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvctl_agent.contract.choices import RANK0, STAGED
from kvctl_agent.contract.values import near
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
"""Kinds of state components by the items that a room has: one; the pages of the last `window` tokens; all pages."""

KV_LAYOUTS = ("nhd", "hnd", "kv-inner", "kv-inner-hnd", "fused", "fused-nhd", "block-outer", "block-outer-hnd")
"""Pool layouts: the keys of the agent's `POOL_LAYOUTS`, whose module imports numpy."""

VERIFY_MODES = ("full", "sample", "off")
PAGE_ORDERS = ("random", "contiguous")
PIPELINES = ("off", "on", "measured")
"""Pipeline modes; a decimal number of layers per group is allowed as well."""

BUSY_ENGINES = ("off", "prefill", "decode", "both")
"""Ranks whose engine thread runs Python between its calls of the agent, as a scheduler does."""

STAGED_PATHS = (STAGED, "auto")
"""Paths on which parts may go through the decode rank's ring."""

DEVICES = ("cpu", "cuda")
"""Memory that holds the KV pools, staging buffers and rings."""

COMPUTES = ("sleep", "gpu")
"""Ways to simulate a forward: a sleep per layer, or matrix products and attention of the model's sizes on a GPU."""

FloorKind = Literal["memcpy", "write", "device", "peer"]
"""Limits of a machine that ranks measure: memcpy of one thread, one write over the transport, a copy within the GPU, a
copy to the peer's GPU."""

Role = Literal["prefill", "decode"]
StateKind = Literal["rows", "window", "pages"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of one instance.

    Args:
        tp: tensor-parallel size of attention.
        layers: number of layers of each pipeline stage. If empty, layers are split evenly and the first stages take the
            remainder.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt lengths of a load: `values` in rotation or, if `values` is empty, uniform random over [low, high]."""

    values: tuple[int, ...] = ()
    low: int = 0
    high: int = 0

    @property
    def text(self) -> str:
        """The lengths in the syntax of `--tokens`: "1024", "16,4096" or "256..2048"."""
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
    """One point of a sweep.

    Args:
        concurrency: maximum number of rooms in flight.
        tokens: prompt lengths; ignored if the plan request lists its requests.
        rooms: number of rooms; None: that of the plan request.
    """

    concurrency: int
    tokens: Tokens
    rooms: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace or of a conversation. Requests are sorted by arrival, those of a session by turn.

    Args:
        arrival_ms: arrival after the first request; ignored for the later turns of a session. None: closed loop, the
            request starts as soon as the limit on rooms in flight allows.
        tokens: prompt length.
        prefix_tokens: page-aligned length of the prefix that the decode side has cached.
        output_tokens: number of tokens to decode; 0 skips decoding.
        session: number of a conversation. Its requests run on one decode dp group, each after the previous one has been
            decoded; -1: no session.
        decode_dp: decode dp group that has the prefix cached; -1: any. Either all requests have a group or none has.
    """

    arrival_ms: float | None
    tokens: int
    prefix_tokens: int = 0
    output_tokens: int = 0
    session: int = -1
    decode_dp: int = -1


@dataclass(frozen=True, slots=True)
class State:
    """One component of per-request state, such as the KV of sliding-window layers or the state of linear attention.

    Args:
        name: any word except "kv" and "draft".
        rows: rows of an item in one layer. For kinds "window" and "pages" an item is a page; `rows` counts per token.
        heads: heads of a row, which tp ranks split; 1 if every rank holds the whole row.
        head_bytes: bytes of one head in one row.
        layers: for each layer of the component, the KV layer beside which it runs, ascending; determines its pipeline
            stage. If empty, the component has one layer beside every KV layer.
        kind: one of `STATE_KINDS`.
        window: length of the window in tokens, for kind "window".
    """

    name: str
    rows: int
    heads: int
    head_bytes: int
    layers: tuple[int, ...] = ()
    kind: StateKind = "rows"
    window: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group: layers whose KV has page tables of its own, such as those with sliding-window attention.

    Args:
        name: any identifier except "kv" and "draft".
        layers: number of layers; they run beside KV layers that are spread evenly over the model.
        page_size: tokens per page, on both sides.
        window: length of the window in tokens, at the end of a prompt; 0: all tokens.
        heads, head_dim: heads and their elements, of K and of V; None: as in the model.
    """

    name: str
    layers: int
    page_size: int
    window: int = 0
    heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All options that determine what a fleet transfers and how; None selects the default of the model or the agent.

    Args:
        prefill: parallel sizes of the prefill instances, all of which serve the one decode instance.
        memory_bytes: limit for all KV pools and rings together.
        kind: one of `KINDS`; for "mla" `head_dim` is the size of the latent, with one head and no V.
        v_head_dim: elements of a V head, if it differs from `head_dim`.
        k_scale_bytes, v_scale_bytes: bytes of quantisation scales per page and head.
        draft_layers: number of layers of a draft model.
        draft_heads, draft_dim: heads of the draft model and their elements; None: as in the target model.
        states: replaces the model's state components; an empty tuple removes them.
        groups: KV groups that the model gets.
        pipelines: pipeline modes to compare, each one of `PIPELINES` or a number of layers per group.
        layer_ms: simulated compute time of one layer for one chunk.
        decode_ms: simulated time of one decode step.
        output_tokens: number of tokens to decode per room.
        rate: requests per second with Poisson arrivals; 0: closed loop.
        requests: requests that replace randomly generated rooms in every load; the load's concurrency still limits the
            rooms in flight.
        prefix_hit: fraction of each prompt that the decode side has cached.
        rooms: number of rooms of a load.
        paths: transfer paths to compare.
        faults: specs of `kvctl.lab.faults.specification`, in force while rooms run.
        device: one of `DEVICES`.
        compute: one of `COMPUTES`; "gpu" replaces `layer_ms`.
        prefill_gpus, decode_gpus: GPUs that the ranks of a side share round-robin. By default the first half of the
            GPUs is for prefill and the rest for decode; a single GPU is for both.
        direct_sms: value of the agents' configuration key of this name.
        page_size: tokens per page, of a side without a page size of its own.
        prefill_page_size, decode_page_size: tokens per page of each side; None: `page_size`.
        cp_interleave: consecutive tokens of a prompt on one decode cp rank.
        kv_layouts: pool layouts of the prefill and the decode side, each one of `KV_LAYOUTS`.
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
    groups: tuple[Group, ...] = ()
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
    faults: tuple[str, ...] = ()
    device: str = "cpu"
    compute: str = "sleep"
    prefill_gpus: tuple[int, ...] = ()
    decode_gpus: tuple[int, ...] = ()
    direct_sms: int | None = None
    prefill_page_size: int | None = None
    decode_page_size: int | None = None
    cp_interleave: int = 1
    kv_layouts: tuple[str, str] = ("nhd", "nhd")

    def page_tokens(self, role: Role) -> int:
        """Returns the tokens per page of a side."""
        own = self.prefill_page_size if role == "prefill" else self.decode_page_size
        return self.page_size if own is None else own

    @property
    def decode_run(self) -> int:
        """Tokens that a page of the decode side takes on all cp ranks together; cached prefixes are multiples."""
        return self.page_tokens("decode") * self.decode.cp


def choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Checks that the value of an option is allowed.

    Raises:
        ConfigError: the value is not allowed; the message suggests the nearest allowed value.
    """
    if value not in allowed:
        raise ConfigError(f"{option} {value!r:.40} is unknown; allowed: {', '.join(allowed)}{near(value, allowed)}")
