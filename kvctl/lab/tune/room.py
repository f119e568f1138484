"""One room as the model sees it: what each writer owes each reader, from the same plan that moves the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvctl.lab.ranks.plan import Plan, PlannedRank, PlannedShare


@dataclass(frozen=True, slots=True)
class Owed:
    """One share of the room.

    Attributes:
        nbytes: payload, over all its parts.
        descriptors: by path; a path that is not legal for it is missing.
        src_row, dst_row: bytes that lie together in the writer's and the reader's pool: a token's row of one plane, or
            a whole page of it where the pool holds just these heads.
    """

    writer: int
    reader: int
    nbytes: int
    descriptors: dict[str, int]
    src_row: float
    dst_row: float
    layers: int


@dataclass(frozen=True, slots=True)
class Room:
    """A room of the plan's longest prompt.

    Attributes:
        tokens: of the prompt, without what decode has cached.
        padded_bytes: payload that no token needs: the last page is rarely full.
        readers_bytes: what the busiest decode rank gets of it.
    """

    tokens: int
    page_size: int
    owed: tuple[Owed, ...]
    nbytes: int
    readers_bytes: int
    padded_bytes: int
    paths: tuple[str, ...]

    @property
    def writers(self) -> set[int]:
        return {each.writer for each in self.owed}

    @property
    def readers(self) -> set[int]:
        return {each.reader for each in self.owed}

    def of_writer(self, writer: int) -> Iterator[Owed]:
        return (each for each in self.owed if each.writer == writer)

    def of_reader(self, reader: int) -> Iterator[Owed]:
        return (each for each in self.owed if each.reader == reader)


def room_of(plan: Plan) -> Room:
    """The room that goes from the first prefill instance's first dp group to the first decode dp group."""
    prefill = _ranks(plan["ranks"], "prefill", 0)
    decode = _ranks(plan["ranks"], "decode", -1)
    shares = [
        share
        for share in plan["shares"]
        if share["instance"] == 0 and prefill[share["writer"]]["dp"] == 0 and decode[share["reader"]]["dp"] == 0
    ]
    longest = max(plan["loads"][0]["rooms"], key=lambda room: room["tokens"] - room["prefix_tokens"])
    tokens, page = longest["tokens"] - longest["prefix_tokens"], plan["page_size"]
    pages = -(-tokens // page)
    owed = tuple(
        _owed(share, prefill[share["writer"]], decode[share["reader"]], plan, pages * page) for share in shares
    )
    nbytes = sum(each.nbytes for each in owed)
    by_reader: dict[int, int] = {}
    for each in owed:
        by_reader[each.reader] = by_reader.get(each.reader, 0) + each.nbytes
    legal = [path for path in ("bulk", "slice", "staged") if all(path in each.descriptors for each in owed)]
    return Room(
        tokens=tokens,
        page_size=page,
        owed=owed,
        nbytes=nbytes,
        readers_bytes=max(by_reader.values(), default=0),
        padded_bytes=round(nbytes * (1 - tokens / (pages * page))) if pages else 0,
        paths=tuple(legal),
    )


def _ranks(ranks: Sequence[PlannedRank], role: str, instance: int) -> dict[int, PlannedRank]:
    return {rank["unique"]: rank for rank in ranks if rank["role"] == role and rank["instance"] == instance}


def _owed(share: PlannedShare, writer: PlannedRank, reader: PlannedRank, plan: Plan, tokens: int) -> Owed:
    layers = share["layers"][1] - share["layers"][0]
    slices = share["descriptors"].get("slice") or 1
    row = share["bytes"] / slices  # of one token, in one plane
    heads = share["heads"][1] - share["heads"][0]
    page = row * plan["page_size"]

    def lies(rank: PlannedRank) -> float:
        whole = heads == rank["heads"][1] - rank["heads"][0]
        return page if whole else row

    counts = {path: count for path, count in share["descriptors"].items() if count is not None}
    if plan["page_order"] == "contiguous" and "bulk" in counts:
        counts["bulk"] = max(1, counts["bulk"] * plan["page_size"] // max(1, tokens))
    return Owed(share["writer"], share["reader"], share["bytes"], counts, lies(writer), lies(reader), layers)
