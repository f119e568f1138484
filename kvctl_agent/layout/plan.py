"""The plan as data: which writer owes which heads and layers to which decode rank.

Both sides compute it from the same `PlanInputs` and compare the inputs, not the result, so a mismatch names the factor
("page_size 64 ≠ 32"). How layers are grouped and which path a part takes is the writer's choice at run time and is no
part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.heads import head_range, mix64, replicas
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.side import Coord, Side
from kvctl_agent.layout.sizes import check_size

PLAN_VERSION = 1
"""Raised whenever the same inputs would give another plan. 1: attention TP and DP, replicated heads, one stage."""

STAGING_ALIGN_BYTES = 256

_WIRE_TYPES: dict[str, type[int] | type[str]] = {
    "plan_version": int,
    "shape.num_layers": int,
    "shape.num_kv_heads": int,
    "shape.k_dim": int,
    "shape.v_dim": int,
    "shape.dtype_bytes": int,
    "shape.kind": str,
    "page_size": int,
    "chunk_pages": int,
    "prefill.dp": int,
    "prefill.pp": int,
    "prefill.cp": int,
    "prefill.tp": int,
    "decode.dp": int,
    "decode.pp": int,
    "decode.cp": int,
    "decode.tp": int,
    "cp_mode": str,
}


class Factor(NamedTuple):
    """One plan input on which the two sides differ."""

    name: str
    mine: int | str
    theirs: int | str

    def __str__(self) -> str:
        return f"{self.name} {self.mine} ≠ {self.theirs}"


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything the plan follows from, and nothing else.

    Raises:
        LayoutError: the two layouts cannot exchange KV, or this version does not serve a factor yet; named either way.
    """

    shape: ModelShape
    page_size: int
    chunk_pages: int
    prefill: Side
    decode: Side
    cp_mode: str = "rank0"
    plan_version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        for name in ("page_size", "chunk_pages", "plan_version"):
            check_size(name, getattr(self, name))
        if self.decode.cp != 1:
            raise LayoutError(
                f"decode cp={self.decode.cp}: decode has no context parallelism; start the decode instance with cp=1"
            )
        if self.prefill.cp != 1:
            raise LayoutError(
                f"prefill cp={self.prefill.cp}: context parallelism is not supported yet by this version; use cp=1"
            )
        if self.cp_mode != "rank0":
            raise LayoutError(f"cp_mode {self.cp_mode!r:.40} is not supported yet by this version; use 'rank0'")
        for role, side in (("prefill", self.prefill), ("decode", self.decode)):
            if side.pp != 1:
                raise LayoutError(
                    f"{role} pp={side.pp}: pipeline stages are not supported yet by this version; use pp=1"
                )
            try:
                head_range(self.shape.num_kv_heads, side.tp, 0)
            except LayoutError as error:
                raise LayoutError(f"{role} tp={side.tp}: {error}") from None

    def diff(self, other: PlanInputs) -> tuple[Factor, ...]:
        """The factors on which `other`, the peer's inputs, differs from these; empty when the plans are the same."""
        theirs = other.to_wire()
        return tuple(Factor(name, mine, theirs[name]) for name, mine in self.to_wire().items() if mine != theirs[name])

    def to_wire(self) -> dict[str, int | str]:
        """The inputs as flat named fields, for example "prefill.tp"."""
        wire: dict[str, int | str] = {}
        for name in _WIRE_TYPES:
            owner, _, field = name.rpartition(".")
            wire[name] = getattr(getattr(self, owner) if owner else self, field)
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, object]) -> PlanInputs:
        """Read a peer's inputs, trusting nothing.

        Raises:
            LayoutError: a field is missing, unknown, of the wrong type or out of range; another plan version may name
                its fields differently, so where the fields do not fit the version is what is reported.
        """
        try:
            return cls._read(wire)
        except LayoutError as error:
            version = wire.get("plan_version")
            if type(version) is int and PLAN_VERSION != version > 0:
                factor = Factor("plan_version", PLAN_VERSION, version)
                raise LayoutError(f"{factor}: run the same release on both sides") from error
            raise

    @classmethod
    def _read(cls, wire: Mapping[str, object]) -> PlanInputs:
        for name in wire:
            if name not in _WIRE_TYPES:
                raise LayoutError(f"plan input {name!r:.40} is unknown")
        numbers: dict[str, int] = {}
        texts: dict[str, str] = {}
        for name, kind in _WIRE_TYPES.items():
            if name not in wire:
                raise LayoutError(f"plan input {name!r} is missing")
            value = wire[name]
            if kind is int:
                numbers[name] = check_size(f"plan input {name!r}", value)
            elif isinstance(value, str):
                texts[name] = value
            else:
                raise LayoutError(f"plan input {name!r} is {value!r:.40}: it must be text")
        prefill, decode = (
            Side(**{axis: numbers[f"{role}.{axis}"] for axis in Coord._fields}) for role in ("prefill", "decode")
        )
        return cls(
            shape=ModelShape(
                num_layers=numbers["shape.num_layers"],
                num_kv_heads=numbers["shape.num_kv_heads"],
                k_dim=numbers["shape.k_dim"],
                v_dim=numbers["shape.v_dim"],
                dtype_bytes=numbers["shape.dtype_bytes"],
                kind=texts["shape.kind"],
            ),
            page_size=numbers["page_size"],
            chunk_pages=numbers["chunk_pages"],
            prefill=prefill,
            decode=decode,
            cp_mode=texts["cp_mode"],
            plan_version=numbers["plan_version"],
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one writer owes one decode rank, in every chunk of a room.

    Attributes:
        writer: Prefill rank (unique rank).
        reader: Decode rank (unique rank).
        src_head: First head, counted in the writer's pool.
        dst_head: First head, counted in the decode rank's pool.
        heads: Number of heads.
        layer_lo: First layer, global id.
        layer_hi: End of the layers, global id, exclusive.
        src_pool_heads: Heads in one token row of the writer's pool: the source stride.
        dst_pool_heads: Heads in one token row of the decode rank's pool: the destination stride.
    """

    writer: int
    reader: int
    src_head: int
    dst_head: int
    heads: int
    layer_lo: int
    layer_hi: int
    src_pool_heads: int
    dst_pool_heads: int

    @property
    def num_layers(self) -> int:
        """Layers owed."""
        return self.layer_hi - self.layer_lo

    @property
    def whole_rows(self) -> bool:
        """Both pools hold exactly these heads, so whole pages can move as they are (the bulk path)."""
        return self.heads == self.src_pool_heads == self.dst_pool_heads

    def payload_bytes(self, shape: ModelShape, tokens: int, layers: int | None = None) -> int:
        """Bytes of KV in a part of `tokens` whole-page tokens and `layers` layers (all of the share's if None)."""
        return (self.num_layers if layers is None else layers) * tokens * self.heads * shape.token_head_bytes

    def part_bytes(self, shape: ModelShape, tokens: int, layers: int | None = None) -> int:
        """Staging bytes of such a part: its payload, aligned up to `STAGING_ALIGN_BYTES`."""
        return -(-self.payload_bytes(shape, tokens, layers) // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class _RoomPlan:
    shares: tuple[Share, ...]
    by_writer: Mapping[int, tuple[Share, ...]]
    by_reader: Mapping[int, tuple[Share, ...]]
    aux_candidates: Mapping[int, tuple[int, ...]]


def prefill_dp(inputs: PlanInputs, room: int) -> int:
    """The prefill dp rank that computes a room: room % dp, as SGLang routes by `bootstrap_room`."""
    return room % inputs.prefill.dp


def shares(inputs: PlanInputs, room: int, decode_dp: int) -> tuple[Share, ...]:
    """Everything owed for a room that goes to `decode_dp`, ordered by reader, then by head.

    A writer and a decode rank share the intersection of their head ranges. Among writers that hold the same head,
    number (mix64(room) + reader) % replicas writes, so rooms and ranks spread over them. Decode ranks that hold the
    same head each get their own copy.

    Raises:
        LayoutError: no such decode dp rank, or inputs of another plan version.
    """
    return _plan_of(inputs, room, decode_dp).shares


def shares_of_writer(inputs: PlanInputs, room: int, decode_dp: int, writer: int) -> tuple[Share, ...]:
    """What one prefill rank owes for a room; empty for a rank that owes nothing.

    Raises:
        LayoutError: no such rank.
    """
    inputs.prefill.coord(writer)
    return _plan_of(inputs, room, decode_dp).by_writer.get(writer, ())


def shares_to_reader(inputs: PlanInputs, room: int, reader: int) -> tuple[Share, ...]:
    """What one decode rank of the room's dp group is owed.

    Raises:
        LayoutError: no such rank.
    """
    return _plan_of(inputs, room, inputs.decode.coord(reader).dp).by_reader[reader]


def aux_writer(inputs: PlanInputs, room: int, reader: int) -> int:
    """The one prefill rank that writes a decode rank's aux row.

    It is elected among the ranks of the last pipeline stage and cp 0 that owe this decode rank KV anyway, so the row
    needs no extra connection.

    Raises:
        LayoutError: no such decode rank.
    """
    candidates = _plan_of(inputs, room, inputs.decode.coord(reader).dp).aux_candidates[reader]
    return candidates[(mix64(room) + reader) % len(candidates)]


def _plan_of(inputs: PlanInputs, room: int, decode_dp: int) -> _RoomPlan:
    # A room changes nothing but which dp rank computed it and which replica writes: a handful of plans serve them all.
    copies = replicas(inputs.shape.num_kv_heads, inputs.prefill.tp)
    choice = mix64(room) % copies if copies > 1 else 0
    return _plan(inputs, prefill_dp(inputs, room), decode_dp, choice)


@lru_cache(maxsize=1024)
def _plan(inputs: PlanInputs, prefill_dp: int, decode_dp: int, choice: int) -> _RoomPlan:
    if inputs.plan_version != PLAN_VERSION:
        raise LayoutError(f"{Factor('plan_version', PLAN_VERSION, inputs.plan_version)}: no plan for another version")
    prefill, decode = inputs.prefill, inputs.decode
    num_heads, num_layers = inputs.shape.num_kv_heads, inputs.shape.num_layers
    copies = replicas(num_heads, prefill.tp)
    writer_heads = max(1, num_heads // prefill.tp)
    every: list[Share] = []
    by_writer: dict[int, tuple[Share, ...]] = {}
    by_reader: dict[int, tuple[Share, ...]] = {}
    for decode_tp in range(decode.tp):
        reader = decode.unique_rank(Coord(dp=decode_dp, pp=0, cp=0, tp=decode_tp))
        want = head_range(num_heads, decode.tp, decode_tp)
        owed: list[Share] = []
        # Blocks of equal heads tile [0, H) on the prefill side; each is held by `copies` neighbouring tp ranks.
        for block in range(want.lo // writer_heads, (want.hi - 1) // writer_heads + 1):
            prefill_tp = block * copies + (choice + reader) % copies
            have = head_range(num_heads, prefill.tp, prefill_tp)
            lo, hi = max(have.lo, want.lo), min(have.hi, want.hi)
            owed.append(
                Share(
                    writer=prefill.unique_rank(Coord(dp=prefill_dp, pp=0, cp=0, tp=prefill_tp)),
                    reader=reader,
                    src_head=lo - have.lo,
                    dst_head=lo - want.lo,
                    heads=hi - lo,
                    layer_lo=0,
                    layer_hi=num_layers,
                    src_pool_heads=have.hi - have.lo,
                    dst_pool_heads=want.hi - want.lo,
                )
            )
        by_reader[reader] = tuple(owed)
        every.extend(owed)
        for share in owed:
            by_writer[share.writer] = (*by_writer.get(share.writer, ()), share)
    aux_candidates = {reader: tuple(share.writer for share in owed) for reader, owed in by_reader.items()}
    return _RoomPlan(tuple(every), by_writer, by_reader, aux_candidates)
