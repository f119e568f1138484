"""Predicts for the admin command `cost` how long the transfer of a prompt takes, from a prefill rank to its peers.

The prediction is that of the latest rooms (`observer.transfer_times`), which include everything that rooms wait for;
the document `COSTS` has the peers and the sizes. Routers ask often: nothing here costs the agent.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl_agent.contract.snapshots import TransferCost
from kvctl_agent.observer.documents import PeerCost
from kvctl_agent.observer.fold import Fold
from kvctl_agent.observer.room_records import FoldedRoom
from kvctl_agent.observer.transfer_times import TransferFit

_Rooms = Sequence[tuple[FoldedRoom, int]]  # in transfer, with their tokens


def transfer_costs(
    agent: str, peers: Sequence[PeerCost], fold: Fold, tokens: int, now_ns: int
) -> tuple[int, list[TransferCost]]:
    """Returns `ahead_ns` and `costs` of the command `cost` for a prompt of `tokens` tokens."""
    fits = {peer["peer"]: fold.transfers.fit(peer["peer"], now_ns) for peer in peers}
    latest = max((fit for fit in fits.values() if fit is not None), key=lambda fit: fit.ended_ns, default=None)
    ahead_ns = round(latest.wait_ns(fold.transfers.ahead(now_ns))) if latest is not None else 0
    rooms = _in_transfer(fold)
    return ahead_ns, [
        {**_row(peer, fits[peer["peer"]], tokens, ahead_ns, rooms.get(peer["peer"], ()), now_ns), "agent": agent}
        for peer in peers
    ]


def _row(
    peer: PeerCost, fit: TransferFit | None, tokens: int, ahead_ns: int, rooms: _Rooms, now_ns: int
) -> TransferCost:
    pages = _pages(peer, tokens)
    nbytes = None if peer["page_bytes"] is None else pages * peer["page_bytes"]
    per_token = None if nbytes is None else nbytes / (max(1, pages) * peer["page_tokens"])
    row: TransferCost = {
        "agent": "",
        "peer": peer["peer"],
        "incarnation": peer["incarnation"],
        "rank": peer["rank"],
        "state": peer["state"],
        "rooms": len(rooms),
        "queued_bytes": _queued_bytes(peer, rooms),
        "bytes": nbytes,
        "bytes_per_token": per_token,
        "path": fit.path or None if fit is not None else None,
        "fixed_ns": None,
        "bytes_per_s": None,
        "alone_ns": None,
        "predicted_ns": None,
        "basis": None,
        "samples": fit.rooms if fit is not None else 0,
        "age_ns": max(0, now_ns - fit.ended_ns) if fit is not None else None,
        "error_ratio": fit.error_ratio if fit is not None else None,
        "reason": peer["reason"],
    }
    if peer["reason"] is not None:
        return row
    if fit is None:
        row["reason"] = "no room was transferred to it yet"
        return row
    alone_ns = round(fit.alone_ns(tokens))
    row |= {"fixed_ns": round(fit.fixed_ns), "alone_ns": alone_ns, "predicted_ns": alone_ns + ahead_ns}
    row["basis"] = "rooms"
    if fit.ns_per_token and per_token:
        row["bytes_per_s"] = round(per_token / fit.ns_per_token * 1e9)
    return row


def _pages(peer: PeerCost, tokens: int) -> int:
    return -(-tokens // peer["page_tokens"]) if peer["page_tokens"] > 0 else 0


def _in_transfer(fold: Fold) -> dict[str, list[tuple[FoldedRoom, int]]]:
    """Returns the rooms in transfer to each peer, by its name, with their tokens."""
    tokens = fold.transfers.in_transfer()
    found: dict[str, list[tuple[FoldedRoom, int]]] = {}
    for record in fold.rooms.active():
        if record.room in tokens:
            for name in record.peers:
                found.setdefault(name, []).append((record, tokens[record.room]))
    return found


def _queued_bytes(peer: PeerCost, rooms: _Rooms) -> int | None:
    """Returns the bytes of rooms in transfer to a peer that this rank has not sent yet; None if unknown."""
    if not peer["page_tokens"]:
        return None
    queued = 0.0
    for record, tokens in rooms:
        if record.planned:  # otherwise another rank is elected
            left = 1 - min(1.0, (record.sent or 0) / record.planned)
            queued += _pages(peer, tokens) * peer["own_page_bytes"] * left
    return round(queued)
