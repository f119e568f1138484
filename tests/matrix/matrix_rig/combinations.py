"""The combinations of the matrix: every two values of any two axes occur together, the same in every run.

Each combination is the one of several random candidates (with a seed) that covers the most new pairs for each of its
ranks, since each rank starts an engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations as choose
from itertools import product
from typing import NamedTuple

from kvctl_agent.layout.parallel import ParallelConfig
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.models import LAYERS, MODELS, fits, same_heads

_SEED = 3
_DRAWS = 24
_MOST_RANKS = 20

# The layers of each pipeline stage; the two sides' uneven stages share no border.
STAGES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "1": ((LAYERS,), (LAYERS,)),
    "even": ((3, 3), (3, 3)),
    "uneven": ((4, 2), (1, 5)),
}

AXES: dict[str, tuple[object, ...]] = {
    "transport": ("nixl", "mooncake"),
    "model": tuple(MODELS),
    "prefill_tp": (1, 2, 4, 8, 6),
    "prefill_cp": (1, 2),
    "prefill_pp": tuple(STAGES),
    "decode_tp": (1, 2, 4, 8, 3),
    "decode_dp": (1, 2),
    "decode_pp": tuple(STAGES),
    "path": ("bulk", "slice", "staged", "auto", "unstaged"),
    "grouped": (False, True),
    "page_size": (1, 16, 64),
    "prefix": ("none", "some", "all"),
    "cp_mode": ("rank0", "all", "all-chunk", "room-hash"),
    "chunk_tokens": (48, 8192),
    "page_order": ("random", "contiguous"),
    "copy_threads": (0, 2),
    "early_send": (True, False),
}
NAMES = tuple(AXES)
# Heads shared out so that neither side's ranks have whole multiples of the other's: 2 of 12 each to 3 each.
_WANTED: tuple[Mapping[str, object], ...] = (
    *(
        {"transport": transport, "path": path, "model": "gqa12", "prefill_tp": 6, "decode_tp": 4}
        for transport, path in product(AXES["transport"], ("slice", "staged", "auto"))
    ),
    *(
        {"transport": transport, "path": path, "grouped": grouped}
        for transport, path, grouped in product(AXES["transport"], AXES["path"], AXES["grouped"])
    ),
)


class Combination(NamedTuple):
    """One point of the matrix; the fields are the axes, mostly as in `Case`. Path "unstaged" is auto without a ring."""

    transport: str
    model: str
    prefill_tp: int
    prefill_cp: int
    prefill_pp: str
    decode_tp: int
    decode_dp: int
    decode_pp: str
    path: str
    grouped: bool
    page_size: int
    prefix: str
    cp_mode: str
    chunk_tokens: int
    page_order: str
    copy_threads: int
    early_send: bool

    @property
    def name(self) -> str:
        """A short name that is sufficient to run this combination alone."""
        prefill = f"tp{self.prefill_tp}cp{self.prefill_cp}pp_{self.prefill_pp}"
        decode = f"tp{self.decode_tp}dp{self.decode_dp}pp_{self.decode_pp}"
        how = f"{self.path}{'_grouped' if self.grouped else ''}"
        rest = f"page{self.page_size}-prefix_{self.prefix}-{self.cp_mode}-chunk{self.chunk_tokens}-{self.page_order}"
        rest += f"-copies{self.copy_threads}{'' if self.early_send else '-late'}"
        return f"{self.transport}-{self.model}-{prefill}-to-{decode}-{how}-{rest}"

    @property
    def prefill(self) -> ParallelConfig:
        return _side(1, self.prefill_pp, self.prefill_cp, self.prefill_tp, 0)

    @property
    def decode(self) -> ParallelConfig:
        return _side(self.decode_dp, self.decode_pp, 1, self.decode_tp, 1)

    @property
    def case(self) -> Case:
        """The case to run."""
        return Case(
            name=self.name,
            transport=self.transport,
            model=self.model,
            prefill=(self.prefill,),
            decode=self.decode,
            path="auto" if self.path == "unstaged" else self.path,
            staging="off" if self.path == "unstaged" else "auto",
            grouped=self.grouped,
            page_size=self.page_size,
            prefix=self.prefix,
            cp_mode=self.cp_mode,
            chunk_tokens=self.chunk_tokens,
            page_order=self.page_order,
            copy_threads=self.copy_threads,
            early_send=self.early_send,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks of both sides."""
        return self.prefill.size + self.decode.size

    def possible(self) -> bool:
        """Whether this is a legal pair of layouts, exercises all of its values, and is not too large."""
        return (
            fits(self.model, self.prefill_tp)
            and fits(self.model, self.decode_tp)
            and (self.path != "bulk" or same_heads(self.model, self.prefill_tp, self.decode_tp))
            and (self.cp_mode == "rank0" or self.prefill_cp > 1)
            and (self.early_send or self.prefill_pp != "1")
            and self.ranks <= _MOST_RANKS
        )


@cache
def combinations() -> tuple[Combination, ...]:
    """Returns the matrix, sorted by transport."""
    source = random.Random(_SEED)
    missing = dict.fromkeys(possible_pairs())
    wanted = list(_WANTED)
    chosen: dict[Combination, None] = {}
    while missing:
        fixed = wanted.pop() if wanted else dict(next(iter(missing)))
        best = max(
            _draws(source, fixed), key=lambda drawn: sum(pair in missing for pair in pairs_of(drawn)) / drawn.ranks
        )
        chosen[best] = None
        for pair in pairs_of(best):
            missing.pop(pair, None)
    return tuple(sorted(chosen, key=lambda one: one.transport))


@cache
def possible_pairs() -> tuple[tuple[tuple[str, object], ...], ...]:
    """All pairs of values of different axes that can occur together."""
    return tuple(
        ((a, x), (b, y)) for a, b in choose(NAMES, 2) for x, y in product(AXES[a], AXES[b]) if _can_be({a: x, b: y})
    )


def _can_be(fixed: Mapping[str, object]) -> bool:
    """Whether any possible combination has these values; tries all values of the axes that decide it."""
    free = [
        name for name in ("model", "prefill_tp", "decode_tp", "path", "prefill_cp", "prefill_pp") if name not in fixed
    ]
    least = {name: AXES[name][0] for name in NAMES} | dict(fixed)
    return any(
        Combination(**{**least, **dict(zip(free, values, strict=True))}).possible()  # type: ignore[arg-type]
        for values in product(*(AXES[name] for name in free))
    )


def _draws(source: random.Random, fixed: Mapping[str, object]) -> Iterator[Combination]:
    found = 0
    while found < _DRAWS:
        values = {name: fixed.get(name) if name in fixed else source.choice(AXES[name]) for name in NAMES}
        if "prefill_cp" not in fixed and "cp_mode" not in fixed and source.random() < 0.5:
            values["prefill_cp"], values["cp_mode"] = 1, "rank0"
        if "early_send" not in fixed and values["prefill_pp"] == "1":
            values["early_send"] = True
        drawn = Combination(**values)  # type: ignore[arg-type]
        if drawn.possible():
            found += 1
            yield drawn


def pairs_of(one: Combination) -> Iterator[tuple[tuple[str, object], ...]]:
    """The values of every two axes."""
    return choose(zip(NAMES, one, strict=True), 2)


def _side(dp: int, stages: str, cp: int, tp: int, which: int) -> ParallelConfig:
    layers = STAGES[stages][which]
    return ParallelConfig(dp, len(layers), cp, tp, layers if stages == "uneven" else ())
