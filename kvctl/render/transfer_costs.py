"""View of `kvctl peers cost`: transfer costs by pair of a prefill and a decode dp group, as a router chooses them.

A row combines what the ranks of both groups report. Every prefill rank sees the whole room: from the end of its own
forward until all decode ranks have all of it. The last forward to end is the one that counts, so the lowest prediction
is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvctl.client.instances import instances
from kvctl.render import palette
from kvctl.render.view import Column, Kind, Row, View, Width

COSTS = View(
    "peers.cost",
    (
        Column("prefill", help="Prefill instance, with the dp group if there are several."),
        Column("decode", help="Decode instance, with the dp group if there are several."),
        Column("predicted", Kind.DURATION, help="Predicted transfer time now, behind the rooms in transfer."),
        Column("alone", Kind.DURATION, help="Predicted transfer time while no other room is in transfer."),
        Column("fixed", Kind.DURATION, Width.NORMAL, "Share of it that does not depend on the size."),
        Column(
            "gb_per_s",
            Kind.RATE,
            help="Rate of one prompt as measured, beyond the fixed time.",
            path=lambda row: row["bytes_per_s"] and row["bytes_per_s"] / 1e9,
            header="GB/S",
        ),
        Column("bytes", Kind.BYTES, Width.NORMAL, "KV bytes of such a prompt."),
        Column("headroom", Kind.BYTES, Width.NORMAL, "Free bytes of the decode rank's ring; the least of the group."),
        Column("rooms", Kind.COUNT, help="Rooms in transfer between the two groups."),
        Column("queued", Kind.BYTES, Width.NORMAL, "Bytes of these rooms that are not sent yet."),
        Column("basis", help="What the prediction rests on: rooms, the latest transfers."),
        Column("error", Kind.RATIO, Width.NORMAL, "Median deviation of the latest transfers from the fit."),
        Column("reason", Kind.SENTENCE, help="Why there is no prediction, or why not to choose the pair."),
        Column("path", width=Width.WIDE, help="Path of the latest room."),
        Column("samples", Kind.COUNT, Width.WIDE, "Transfers that the prediction is based on."),
        Column("age", Kind.DURATION, Width.WIDE, "Time since the latest of them."),
        Column("staged", Kind.BYTES, Width.WIDE, "Bytes of the prompt through each decode rank's ring."),
        Column("accepting", Kind.FLAG, Width.WIDE, "Whether all ranks of both groups take new rooms."),
        Column("state", width=Width.WIDE, help="Worst state of the connections.", styles=palette.PEER_STATES),
        Column("prefill_ranks", Kind.LIST, Width.WIDE, "Agents of the prefill group."),
        Column("decode_ranks", Kind.LIST, Width.WIDE, "Agents of the decode group."),
    ),
    sort=("prefill", "decode"),
    empty="no prefill rank is connected to a decode rank",
)

_STATES = ("refused", "lost", "suspect", "connecting", "ready")  # worst first


class RankCost(NamedTuple):
    """What one agent answered to `status` and `cost`, under the name by which it is told apart from others."""

    name: str
    status: Mapping[str, Any]
    cost: Mapping[str, Any]


def cost_rows(ranks: Sequence[RankCost], tokens: int) -> list[dict[str, Any]]:
    """Returns one row of COSTS per connected pair of a prefill and a decode dp group, for a prompt of `tokens` tokens.

    JSON also has `ahead_ns`, and `ranks`: the prefill ranks' rows about each decode rank.
    """
    groups = _groups(ranks)
    decoders = {rank.name: rank for rank in ranks if rank.cost["role"] == "decode"}
    found: dict[tuple[str, str], list[tuple[RankCost, Mapping[str, Any]]]] = {}
    for rank in ranks:
        for cost in rank.cost["costs"]:
            # A decode rank that does not answer is a group of its own.
            pair = groups[rank.name], groups.get(cost["peer"], cost["peer"])
            found.setdefault(pair, []).append((rank, scaled(rank.cost, cost, tokens)))
    return [_pair(*pair, rows, decoders, tokens) for pair, rows in found.items()]


def scaled(answer: Mapping[str, Any], cost: Mapping[str, Any], tokens: int) -> Mapping[str, Any]:
    """Returns a row of `cost` for a prompt of another length than the agent was asked for, as in a recording."""
    if answer["tokens"] == tokens or cost["bytes_per_token"] is None:
        return cost
    nbytes = round(cost["bytes_per_token"] * tokens)
    row = {**cost, "bytes": nbytes, "alone_ns": None, "predicted_ns": None}
    if cost["fixed_ns"] is not None:
        own = nbytes / cost["bytes_per_s"] * 1e9 if cost["bytes_per_s"] else 0
        row["alone_ns"] = round(cost["fixed_ns"] + own)
        row["predicted_ns"] = row["alone_ns"] + answer["ahead_ns"]
    return row


def _groups(ranks: Sequence[RankCost]) -> dict[str, str]:
    """Returns the name of each rank's dp group, by name: that of the instance, with the dp rank if several."""
    found: dict[str, str] = {}
    for rank, instance in zip(ranks, instances([each.status for each in ranks]), strict=True):
        several = rank.status["sizes"]["dp"] > 1
        found[rank.name] = f"{instance} dp{rank.status['rank']['dp']}" if several else instance
    return found


def _pair(
    prefill: str,
    decode: str,
    rows: Sequence[tuple[RankCost, Mapping[str, Any]]],
    decoders: Mapping[str, RankCost],
    tokens: int,
) -> dict[str, Any]:
    writers = {rank.name: rank for rank, _ in rows}
    by_writer = [max((cost for rank, cost in rows if rank.name == name), key=_alone) for name in writers]
    best = min(by_writer, key=_alone)
    peers = list(dict.fromkeys(cost["peer"] for _, cost in rows))
    readers = [decoders[name] for name in peers if name in decoders]
    rings = [each.cost["ring"] for each in readers if each.cost["ring"] is not None]
    ranks = [*writers.values(), *readers]
    draining = [each.name for each in ranks if not each.cost["accepting"]]
    unusable = next((cost["reason"] for _, cost in rows if cost["state"] != "ready"), None)
    reason = best["reason"] or unusable or (f"{', '.join(draining)} accepts no new rooms" if draining else None)
    queued = [cost["queued_bytes"] for _, cost in rows]
    nbytes = best["bytes"]
    return {
        "prefill": prefill,
        "decode": decode,
        "tokens": tokens,
        **{name: best[name] for name in _BEST},
        "predicted_ns": best["predicted_ns"],
        "state": min((cost["state"] for _, cost in rows), key=_STATES.index),
        "reason": reason,
        "accepting": not draining,
        "rooms": max(cost["rooms"] for _, cost in rows),
        "queued_bytes": None if None in queued else sum(queued),
        "headroom_bytes": min((ring["size_bytes"] - ring["used_bytes"] for ring in rings), default=None),
        "staged_bytes": nbytes // len(peers) if best["path"] == "staged" and nbytes is not None else None,
        "prefill_ranks": [*writers],
        "decode_ranks": peers,
        "ahead_ns": max(rank.cost["ahead_ns"] for rank in writers.values()),
        "ranks": [cost for _, cost in rows],
    }


_BEST = (
    "bytes",
    "bytes_per_token",
    "bytes_per_s",
    "fixed_ns",
    "alone_ns",
    "path",
    "basis",
    "samples",
    "age_ns",
    "error_ratio",
)


def _alone(cost: Row) -> float:
    alone = cost["alone_ns"]
    return float("inf") if alone is None else float(alone)
