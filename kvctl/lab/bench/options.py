"""Parses the values of the options of `kvctl bench`: lists, ranges, sweeps, percentages.

Every function raises ValueError for a malformed value, with an example of a correct one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from kvctl.lab.faults.specification import Fault, parse_faults
from kvctl.lab.ranks.request import BUSY_ENGINES, PIPELINES, Group, Load, Sizes, State, Tokens
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.contract.values import near

CP_MODES = KEYS_BY_NAME["cp_mode"].choices
TRANSPORTS = KEYS_BY_NAME["transport"].choices
AXES = ("concurrency", "tokens")
_MAX_POINTS = 64
_MAX_INSTANCES = 16
_SIZE = re.compile(r"(dp|pp|cp|tp)(\d{1,5}(?:\+\d{1,5})*)")
_STATE = re.compile(r"([a-z][a-z0-9_-]*):(\d{1,9})x(\d{1,9})x(\d{1,9})(?::(pages|window=(\d{1,9})))?")
_GROUP_NAME = re.compile(r"[a-z][a-z0-9_]*")
_GROUP_FIELDS = ("layers", "page", "window", "heads", "dim")


def parse_tokens(text: str) -> Tokens:
    """Parses prompt lengths: `1024`, `16,4096` (assigned to rooms in turn) or `256..2048` (uniformly distributed)."""
    low, separator, high = text.partition("..")
    if separator:
        return Tokens(low=_positive(low, text), high=_positive(high, text))
    return Tokens(values=tuple(_positive(word, text) for word in text.split(",")))


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Parses a sweep into its axis and values: `concurrency=1,4,16`, or `tokens=256..16384`, doubling at each step."""
    axis, separator, values = text.partition("=")
    if not separator or axis not in AXES:
        raise ValueError(f"{text!r}: write {' or '.join(f'{axis}=1,4,16' for axis in AXES)}, or =1..1024")
    first, ranged, last = values.partition("..")
    if not ranged:
        points = [_positive(word, text) for word in values.split(",")]
    else:
        low, high = _positive(first, text), _positive(last, text)
        if high < low:
            raise ValueError(f"{text!r}: the end of the range is below its start")
        points = []
        while low < high:
            points.append(low)
            low *= 2
        points.append(high)
    if len(points) > _MAX_POINTS:
        raise ValueError(f"{text!r}: {len(points)} points, at most {_MAX_POINTS}")
    return axis, list(dict.fromkeys(points))


def parse_percent(text: str) -> float:
    """Parses `5%` or `5` as 0.05."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ValueError(f"{text!r} is not a percentage: write 5%")
    return value / 100


def parse_bench_faults(text: str) -> tuple[Fault, ...]:
    """Parses fault specifications, and rejects faults that end a rank or preempt rooms; "" means none."""
    faults = parse_faults(text) if text else ()
    for fault in faults:
        if fault.name == "preempt":
            raise ValueError(f"{fault.text}: the rooms of a bench keep their pages; kvctl demo preempts rooms")
        if fault.name in ("kill", "replace"):
            raise ValueError(f"{fault.text}: a bench cannot go on without a rank; kvctl demo kills and restarts ranks")
    return faults


def parse_names(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list; empty words are dropped."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_gpus(text: str) -> tuple[int, ...]:
    """Parses a list of GPU numbers, such as `0,1`; "" means none."""
    words = parse_names(text)
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ValueError(f"{text!r} is not a list of GPU numbers: write 0,1 (nvidia-smi -L lists them)")
    return tuple(map(int, words))


def sweep_loads(concurrency: int, tokens: Tokens, sweeps: list[tuple[str, list[int]]]) -> tuple[Load, ...]:
    """Returns a load for every combination of swept values; an axis without a sweep keeps the value of its option.

    Args:
        concurrency, tokens: Values of the options.
        sweeps: Axis and values of each sweep, from `parse_sweep`.
    """
    axes = dict(sweeps)
    if len(axes) < len(sweeps):
        raise ValueError("each axis can be swept once")
    lengths = [Tokens(values=(value,)) for value in axes["tokens"]] if "tokens" in axes else [tokens]
    return tuple(Load(at, length) for length in lengths for at in axes.get("concurrency", [concurrency]))


def _positive(word: str, whole: str) -> int:
    word = word.strip().replace("_", "")
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{whole!r}: {word!r} is not a whole number of at least 1")
    return int(word)


def parse_instances(text: str) -> tuple[Sizes, ...]:
    """Parses sizes of prefill instances: `tp4,tp2:pp2` are two; `pp10+22` gives the layers of each pipeline stage."""
    instances = tuple(_instance(word.strip(), text) for word in text.split(","))
    if len(instances) > _MAX_INSTANCES:
        raise ValueError(f"{text!r}: {len(instances)} instances, at most {_MAX_INSTANCES}")
    return instances


def parse_stages(text: str) -> tuple[int, ...]:
    """Parses the number of layers of each pipeline stage, such as `10,22`; "" means none."""
    return tuple(_positive(word, text) for word in text.split(",")) if text else ()


def parse_cp_modes(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of CP modes (`CP_MODES`)."""
    return _choices(text, CP_MODES, lambda word: word in CP_MODES)


def parse_pipelines(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of pipeline settings, each one of `PIPELINES` or a number of layers per group."""
    return _choices(text, (*PIPELINES, "4"), lambda word: word in PIPELINES or (word.isdecimal() and int(word) > 0))


def parse_kv_layouts(text: str) -> tuple[str, str]:
    """Parses the pool layout of both sides, such as `hnd`, or those of prefill and decode, such as `nhd,fused`."""
    names = parse_names(text)
    if not 1 <= len(names) <= 2:
        raise ValueError(f"{text!r}: write one layout for both sides, or those of prefill and decode, such as nhd,hnd")
    return names[0], names[-1]


def parse_busy_engines(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of `BUSY_ENGINES`."""
    return _choices(text, BUSY_ENGINES, lambda word: word in BUSY_ENGINES)


def parse_scale(text: str) -> Fraction:
    """Parses the factor of a trace's prompt lengths as an exact fraction."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 100:
        raise ValueError(f"{text!r} is not a factor: write a number above 0 and up to 100, such as 0.05")
    return value


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
    for field in filter(None, listed.split(",")):
        key, _, value = field.partition("=")
        if key not in _GROUP_FIELDS:
            hint = near(key, _GROUP_FIELDS)
            raise ValueError(f"{text!r}: field {key!r} is unknown; allowed: {', '.join(_GROUP_FIELDS)}{hint}")
        if key in fields:
            raise ValueError(f"{text!r}: {key} is given twice")
        fields[key] = _positive(value, text)
    if not _GROUP_NAME.fullmatch(name) or not {"layers", "page"} <= fields.keys():
        raise ValueError(
            f"{text!r}: write NAME:layers=N,page=TOKENS[,window=TOKENS][,heads=N][,dim=N], such as "
            f"swa:layers=16,page=16,window=1024"
        )
    return Group(
        name, fields["layers"], fields["page"], fields.get("window", 0), fields.get("heads"), fields.get("dim")
    )


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


def _choices(text: str, shown: tuple[str, ...], allowed: Callable[[str], bool]) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(parse_names(text)))
    for word in words:
        if not allowed(word):
            raise ValueError(f"{word!r} is unknown; allowed: {', '.join(shown)}{near(word, shown)}")
    if not words:
        raise ValueError(f"no value is given; allowed: {', '.join(shown)}")
    return words
