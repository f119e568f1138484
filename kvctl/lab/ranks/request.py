"""Describes a request for a fleet: model, instances, loads and transfer options, and their syntax as text.

`kvctl bench`, `tune` and `demo` build a `PlanRequest`; `planner` turns it into a `Plan`. A field that is declared by
`option` is an option of the command line, too, with its syntax and its help. Functions that parse values raise
ValueError for a malformed value, with an example of a correct one. This module imports neither numpy nor msgspec,
because the definitions of command-line options import it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

from kvctl_agent.contract.choices import RANK0, STAGED
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.contract.values import near
from kvctl_agent.errors import ConfigError

DTYPE_BYTES: dict[str, int] = {"fp8": 1, "int8": 1, "fp8-scaled": 1, "int8-scaled": 1, "bf16": 2, "fp16": 2, "fp32": 4}
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
PIPELINES = ("off", "on", "auto")
"""Pipeline modes; a decimal number of layers per group is allowed as well."""

ENGINE_KINDS = ("python", "spin", "launch", "long")
"""Loops that the thread of a busy engine runs between its calls of the agent, as schedulers do: plain Python without a
pause; short turns with brief releases of the interpreter; bursts of launches; long calls that release it."""

_BUSY_RANKS = ("prefill", "decode", "both")
BUSY_ENGINES = ("off", *_BUSY_RANKS, *(f"{ranks}:{kind}" for kind in ENGINE_KINDS[1:] for ranks in _BUSY_RANKS))
"""Ranks whose engine is busy, and the kind of its loop; without a kind the first of `ENGINE_KINDS`."""

STAGED_PATHS = (STAGED, "auto")
"""Paths on which parts may go through the decode rank's ring."""

DEVICES = ("cpu", "cuda")
"""Memory that holds the KV pools, staging buffers and rings."""

FloorKind = Literal["memcpy", "write", "device", "peer"]
"""Limits of a machine that ranks measure: memcpy of one thread, one write over the transport, a copy within the GPU, a
copy to the peer's GPU."""

CP_MODES, PATHS = KEYS_BY_NAME["cp_mode"].choices, KEYS_BY_NAME["path"].choices

Role = Literal["prefill", "decode"]
StateKind = Literal["rows", "window", "pages"]

_MAX_INSTANCES = 16
_SIZE = re.compile(r"(dp|pp|cp|tp)(\d{1,5}(?:\+\d{1,5})*)")
_STATE = re.compile(r"([a-z][a-z0-9_-]*):(\d{1,9})x(\d{1,9})x(\d{1,9})(?::(pages|window=(\d{1,9})))?")
_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_GROUP_FIELDS = ("layers", "page", "window", "heads", "dim")

_STATE_HELP = (
    "State per request, rows x heads x bytes: conv:4x1x256, swa:1x8x256:window=512, idx:1x1x132:pages. Repeatable."
)
_GROUP_HELP = (
    "Layers with page tables of their own, as swa:layers=16,page=16,window=1024: decode receives the pages of the "
    "window at the end of a prompt, without window all; heads=N and dim=N if unlike the model's. Repeatable."
)
_PATHS_HELP = (
    "Paths to compare: bulk, slice, staged, direct (between GPUs), auto. [default: those that suit the layouts]"
)
_PIPELINE_HELP = (
    "Send layer groups while later layers are computed: off, on, auto, or layers per group; several are compared."
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Parallel sizes of one instance.

    Args:
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

    def draw(self, rooms: int, source: random.Random) -> list[int]:
        """Returns the prompt length of each of `rooms` rooms."""
        if self.values:
            return [self.values[index % len(self.values)] for index in range(rooms)]
        return [source.randint(self.low, self.high) for _ in range(rooms)]


@dataclass(frozen=True, slots=True)
class Load:
    """One point of a sweep. `rooms`: number of rooms; None: that of the plan request."""

    concurrency: int
    tokens: Tokens
    rooms: int | None = None


def draw_arrivals(rate: float, rooms: int, seed: int) -> list[float]:
    """Returns the arrival of each room in ms after the first room: a Poisson process of `rate` rooms per second."""
    source = random.Random(f"arrivals {seed}")
    gaps = [source.expovariate(rate) * 1e3 for _ in range(rooms - 1)]
    return list(accumulate(gaps, initial=0.0))


@dataclass(frozen=True, slots=True)
class State:
    """One component of per-request state, such as the KV of sliding-window layers or the state of linear attention.

    Args:
        name: any word except "kv" and "draft".
        rows: rows of an item in one layer. For kinds "window" and "pages" an item is a page; `rows` counts per token.
        heads: heads of a row, which tp ranks split; 1 if every rank holds the whole row.
        layers: for each layer of the component, the KV layer beside which it runs, ascending; determines its pipeline
            stage. If empty, the component has one layer beside every KV layer.
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
        window: length of the window in tokens, at the end of a prompt; 0: all tokens.
        heads, head_dim: heads and their elements, of K and of V; None: as in the model.
    """

    name: str
    layers: int
    page_size: int
    window: int = 0
    heads: int | None = None
    head_dim: int | None = None


# ---- syntax of values -----------------------------------------------------------------------------------------------


def parse_tokens(text: str) -> Tokens:
    """Parses prompt lengths: `1024`, `16,4096` (assigned to rooms in turn) or `256..2048` (uniformly distributed)."""
    low, separator, high = text.partition("..")
    if separator:
        return Tokens(low=positive(low, text), high=positive(high, text))
    return Tokens(values=tuple(positive(word, text) for word in text.split(",")))


def parse_names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list; empty words are dropped."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parses a list of GPU numbers, such as `0,1`; "" means none."""
    words = parse_names(text)
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ValueError(f"{text!r} is not a list of GPU numbers: write 0,1 (nvidia-smi -L lists them)")
    return tuple(map(int, words))


def parse_instances(text: str) -> tuple[Sizes, ...]:
    """Parses sizes of prefill instances: `tp4,tp2:pp2` are two; `pp10+22` gives the layers of each pipeline stage."""
    instances = tuple(_instance(word.strip(), text) for word in text.split(","))
    if len(instances) > _MAX_INSTANCES:
        raise ValueError(f"{text!r}: {len(instances)} instances, at most {_MAX_INSTANCES}")
    return instances


def parse_stages(text: str) -> tuple[int, ...]:
    """Parses the number of layers of each pipeline stage, such as `10,22`; "" means none."""
    return tuple(positive(word, text) for word in text.split(",")) if text else ()


def parse_pipelines(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of pipeline settings, each one of `PIPELINES` or a number of layers per group."""
    return parse_choices(
        text, (*PIPELINES, "4"), lambda word: word in PIPELINES or (word.isdecimal() and int(word) > 0)
    )


def parse_kv_layouts(text: str) -> tuple[str, str]:
    """Parses the pool layout of both sides, such as `hnd`, or those of prefill and decode, such as `nhd,fused`."""
    names = parse_names(text)
    if not 1 <= len(names) <= 2:
        raise ValueError(f"{text!r}: write one layout for both sides, or those of prefill and decode, such as nhd,hnd")
    return names[0], names[-1]


def parse_scale_bytes(text: str) -> tuple[int | None, int | None]:
    """Parses the bytes of quantization scales per page and head of K and of V: `4` for both, or `4,2`.

    "" returns None for both, which leaves them to the element type.
    """
    if not text:
        return None, None
    words = text.split(",")
    if len(words) > 2 or not all(word.strip().isdecimal() for word in words):
        raise ValueError(f"{text!r}: write bytes per page and head: 4, or 4,2 for K and V")
    return int(words[0]), int(words[-1])


def parse_state(text: str) -> State:
    """Parses a state component: `NAME:ROWSxHEADSxBYTES`.

    `:pages` or `:window=TOKENS` is appended if its items are pages, of the whole prompt or of its last tokens.
    """
    found = _STATE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: write NAME:ROWSxHEADSxBYTES, such as conv:4x1x256, swa:1x8x256:window=512")
    name, rows, heads, head_bytes, kind, window = found.groups()
    item = State(name, int(rows), int(heads), int(head_bytes))
    if kind is None:
        return item
    return replace(item, kind="window" if window else "pages", window=int(window or 0))


def parse_kv_group(text: str) -> Group:
    """Parses a KV group: `NAME:layers=N,page=TOKENS[,window=TOKENS][,heads=N][,dim=N]`, the fields in any order."""
    name, _, listed = text.partition(":")
    fields: dict[str, int] = {}
    for each in filter(None, listed.split(",")):
        key, _, value = each.partition("=")
        if key not in _GROUP_FIELDS:
            hint = near(key, _GROUP_FIELDS)
            raise ValueError(f"{text!r}: field {key!r} is unknown; allowed: {', '.join(_GROUP_FIELDS)}{hint}")
        if key in fields:
            raise ValueError(f"{text!r}: {key} is given twice")
        fields[key] = positive(value, text)
    if not _GROUP_NAME.fullmatch(name) or not {"layers", "page"} <= fields.keys():
        raise ValueError(
            f"{text!r}: write NAME:layers=N,page=TOKENS[,window=TOKENS][,heads=N][,dim=N], such as "
            f"swa:layers=16,page=16,window=1024"
        )
    return Group(
        name, fields["layers"], fields["page"], fields.get("window", 0), fields.get("heads"), fields.get("dim")
    )


def positive(word: str, whole: str) -> int:
    """Parses a whole number of at least 1, such as `4_096`; `whole` is the value that has it, for the error text."""
    word = word.strip().replace("_", "")
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{whole!r}: {word!r} is not a whole number of at least 1")
    return int(word)


def _instance(word: str, whole: str) -> Sizes:
    sizes: dict[str, int] = {}
    stages: tuple[int, ...] = ()
    for piece in word.split(":"):
        found = _SIZE.fullmatch(piece)
        if found is None or ("+" in found[2] and found[1] != "pp") or "0" in found[2].split("+"):
            raise ValueError(
                f"{whole!r}: {piece!r} is not a size of a prefill instance; write tp4 or tp2:pp2 "
                f"(dp, pp, cp and tp; pp10+22 for stages of 10 and 22 layers), instances separated by commas"
            )
        axis, numbers = found[1], [int(number) for number in found[2].split("+")]
        if axis in sizes:
            raise ValueError(f"{whole!r}: {word!r} gives {axis} twice")
        if len(numbers) > 1:
            stages = tuple(numbers)
        sizes[axis] = len(numbers) if len(numbers) > 1 else numbers[0]
    return Sizes(**sizes, layers=stages)


def parse_choices(text: str, shown: tuple[str, ...], allowed: Callable[[str], bool]) -> tuple[str, ...]:
    """Parses a comma-separated list of at least one word, without duplicates.

    Args:
        shown: allowed words, or examples of them, for the error text.
    """
    words = tuple(dict.fromkeys(parse_names(text)))
    for word in words:
        if not allowed(word):
            raise ValueError(f"{word!r} is unknown; allowed: {', '.join(shown)}{near(word, shown)}")
    if not words:
        raise ValueError(f"no value is given; allowed: {', '.join(shown)}")
    return words


def engine_kind(busy_engine: str, role: str) -> str:
    """Returns the loop of a rank's engine, one of `ENGINE_KINDS`; "" if it waits. `busy_engine`: of `BUSY_ENGINES`."""
    ranks, _, kind = busy_engine.partition(":")
    return (kind or ENGINE_KINDS[0]) if ranks in (role, "both") else ""


def choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    """Checks that the value of an option is allowed.

    Raises:
        ConfigError: the value is not allowed; the message suggests the nearest allowed value.
    """
    if value not in allowed:
        raise ConfigError(f"{option} {value!r:.40} is unknown; allowed: {', '.join(allowed)}{near(value, allowed)}")


# ---- the request ----------------------------------------------------------------------------------------------------


def option(
    text: str, default: Any = None, metavar: str | None = "N", parse: Callable[[str], Any] | None = None, **more: Any
) -> Any:
    """Declares a field that is an option of `kvctl bench`, named like the field.

    Args:
        default: default of the option: the field's, or a text that `parse` turns into the field's.
        more: `flag`: name of the option if it differs; `choices`: allowed values; `least`: minimum of a number, or of
            each number of a tuple, if it is not 1; `value`: value of an option that takes none.
    """
    value = parse(default) if parse is not None and isinstance(default, str) else default
    return field(default=value, metadata={"text": text, "default": default, "metavar": metavar, "parse": parse, **more})


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Shape of the model and of the KV pools; None selects the default of the model."""

    model: str | None = option("A known model's KV shape. [default: llama-3.1-8b]", metavar="NAME")
    layers: int | None = option("Layers. [default: the model's]")
    kv_heads: int | None = option("KV heads of the whole model.")
    head_dim: int | None = option("Elements per head of a row of K, and of V.")
    v_head_dim: int | None = option("Elements per head of a row of V, if they differ from K's.")
    kind: str | None = option(
        "One latent row per token (of --head-dim), the same on all TP ranks.", metavar=None, flag="mla", value="mla"
    )
    dtype: str | None = option(
        "Element type. [default: the model's]", None, "|".join(DTYPE_BYTES), choices=tuple(DTYPE_BYTES)
    )
    scale_bytes: tuple[int | None, int | None] = option(
        "Bytes of quantisation scale per page and head. [default: the element type's]",
        "",
        "K[,V]",
        parse_scale_bytes,
        least=0,
    )
    draft_layers: int | None = option("Layers of a draft model, in a pool of their own.", least=0)
    draft_heads: int | None = option("KV heads of the draft model. [default: the model's]")
    draft_dim: int | None = option("Head dim of the draft model. [default: the model's]")
    # An empty tuple removes the model's state components.
    states: tuple[State, ...] | None = option(_STATE_HELP, None, "NAME:RxHxB", parse_state, flag="state")
    groups: tuple[Group, ...] = option(_GROUP_HELP, (), "NAME:FIELD=N,…", parse_kv_group, flag="kv-group")
    page_size: int = option("Tokens per page.", 16)
    prefill_page_size: int | None = option("Tokens per page of the prefill side. [default: --page-size]")
    decode_page_size: int | None = option("The same for decode; the smaller page divides the larger.")
    cp_interleave: int = option(
        "Consecutive tokens of a prompt on each of the --decode-cp ranks that share it.", 1, "TOKENS"
    )
    kv_layouts: tuple[str, str] = option(
        f"Order of the axes in the KV pools, of both sides or of each: {', '.join(KV_LAYOUTS)}.",
        default="nhd",
        metavar="PREFILL[,DECODE]",
        parse=parse_kv_layouts,
        flag="kv-layout",
        choices=KV_LAYOUTS,
    )
    page_order: str = option(
        "Order of a room's pages in the pools.", PAGE_ORDERS[0], "|".join(PAGE_ORDERS), choices=PAGE_ORDERS
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How rooms are transferred; None selects the default of the agent."""

    paths: tuple[str, ...] = option(_PATHS_HELP, "", "A,B,…", parse_names, flag="path", choices=PATHS)
    ring_mb: int | None = option("Staging ring of each decode rank. [default: sized for the load]")
    chunk_tokens: int | None = option("Tokens per chunk of the grid. [default: 8192]")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Memory and GPUs of the ranks."""

    device: str = option(
        "Memory of KV pools and staging: host memory, or that of NVIDIA GPUs.", DEVICES[0], None, choices=DEVICES
    )
    prefill_gpus: tuple[int, ...] = option(
        "GPU numbers that prefill ranks take in turn; 0,0 is the same as 0. [default: the first half]",
        default="",
        metavar="A,B,…",
        parse=parse_gpus,
        least=0,
    )
    decode_gpus: tuple[int, ...] = option(
        "The same for decode ranks. [default: the other half; the same GPU if there is only one]",
        default="",
        metavar="A,B,…",
        parse=parse_gpus,
        least=0,
    )
    direct_sms: int | None = option("Multiprocessors that a copy on path direct may use. [default: the agent's]")


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Simulation of the engines."""

    pipelines: tuple[str, ...] = option(_PIPELINE_HELP, "off", "A,B,…", parse_pipelines, flag="pipeline")
    layer_ms: float = option("Compute time per layer and chunk.", 0.0, "X", least=0)
    decode_ms: float = option("Time per decode step.", 0.0, "X", least=0)


@dataclass(frozen=True)
class PlanRequest(ModelOptions, EngineOptions, DeviceOptions, ComputeOptions):
    """All that determines what a fleet transfers and how.

    Args:
        prefill: parallel sizes of the prefill instances, all of which serve the one decode instance.
        memory_bytes: limit for all KV pools and rings together.
        rate: requests per second with Poisson arrivals; 0: closed loop.
        prefix_hit: fraction of each prompt that the decode side has cached.
        rooms: number of rooms of a load; None: enough for a stable result.
    """

    prefill: tuple[Sizes, ...]
    decode: Sizes
    loads: tuple[Load, ...]
    memory_bytes: int
    seed: int
    cp_mode: str = RANK0
    transport: str = "nixl"
    output_tokens: int = 0
    rate: float = 0.0
    prefix_hit: float = 0.0
    rooms: int | None = None

    def page_tokens(self, role: Role) -> int:
        """Returns the tokens per page of a side."""
        own = self.prefill_page_size if role == "prefill" else self.decode_page_size
        return self.page_size if own is None else own

    @property
    def decode_run(self) -> int:
        """Tokens that a page of the decode side takes on all cp ranks together; cached prefixes are multiples."""
        return self.page_tokens("decode") * self.decode.cp
