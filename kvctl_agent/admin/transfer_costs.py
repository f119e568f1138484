"""Predicts for the admin command `cost` how long the transfer of a prompt takes, from a prefill rank to its peers.

The prediction is that of the latest rooms (`telemetry.transfer_times`), which include everything that rooms wait for.
Before any room was transferred, it is the sum of the calibrated costs of the prompt's parts, as by which `auto` chooses
paths: the costs of this rank alone, without the other ranks of its instance that may share its cores.

Everything runs on the admin thread, and takes no lock that a transfer needs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvctl_agent.contract.snapshots import TransferCost
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.plan import TransferSlices, slices_of_writer, transfer_slices
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.telemetry.room_records import RoomRecord
from kvctl_agent.telemetry.transfer_times import TransferFit

_FEWEST_ROOMS = 4  # from which on the rooms count more than the calibration
_ROOM_NUMBERS = 64  # a writer may be elected for a share of the rooms only


class TransferCosts:
    """Costs of transfers from one prefill rank."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts

    def read(self, tokens: int) -> tuple[int, list[TransferCost]]:
        """Returns `ahead_ns` and `costs` of the command `cost` for a prompt of `tokens` tokens; empty if decode."""
        parts = self._parts
        if parts.role == "decode":
            return 0, []
        now_ns = time.monotonic_ns()
        peers = list(parts.machine.peers.values())
        fits = {peer.name: parts.telemetry.transfers.fit(peer.name, now_ns) for peer in peers}
        latest = max((fit for fit in fits.values() if fit is not None), key=lambda fit: fit.ended_ns, default=None)
        ahead_ns = round(latest.wait_ns(parts.telemetry.transfers.ahead(now_ns))) if latest is not None else 0
        rooms = self._in_transfer()
        return ahead_ns, [
            self._row(peer, fits[peer.name], tokens, ahead_ns, rooms.get(peer.name, ()), now_ns) for peer in peers
        ]

    def _row(
        self,
        peer: Peer,
        fit: TransferFit | None,
        tokens: int,
        ahead_ns: int,
        rooms: Sequence[tuple[RoomRecord, int]],
        now_ns: int,
    ) -> TransferCost:
        parts, inputs = self._parts, peer.inputs
        nbytes = prompt_bytes(inputs, peer.coord.dp, parts.local.coord.dp, tokens) if inputs is not None else None
        whole = max(1, -(-tokens // inputs.page_size) * inputs.page_size) if inputs is not None else 1
        per_token = nbytes / whole if nbytes is not None else None
        row: TransferCost = {
            "agent": parts.name,
            "peer": peer.name,
            "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
            "rank": {**peer.coord._asdict(), "unique": peer.info.unique_rank} if peer.info is not None else None,
            "state": peer.state.value,
            "rooms": len(rooms),
            "queued_bytes": self._queued_bytes(peer, rooms),
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
            "reason": None,
        }
        calibrated = self._calibrated(peer, tokens) if fit is None or fit.rooms < _FEWEST_ROOMS else None
        if not peer.usable:
            row["reason"] = f"{peer.name} is {peer.state.value}"
        elif calibrated is not None:
            path, alone_ns, rate = calibrated
            row |= {"path": row["path"] or path, "basis": "calibration", "bytes_per_s": round(rate)}
            row["fixed_ns"] = max(0, round(alone_ns - (nbytes or 0) / rate * 1e9))
            row["alone_ns"] = round(alone_ns)
        elif fit is not None:
            row |= {"basis": "rooms", "fixed_ns": round(fit.fixed_ns), "alone_ns": round(fit.alone_ns(tokens))}
            if fit.ns_per_token and per_token:
                row["bytes_per_s"] = round(per_token / fit.ns_per_token * 1e9)
        else:
            row["reason"] = "no room was transferred to it yet, and its connection is not measured: kvctl peers probe"
        if (alone := row["alone_ns"]) is not None:
            row["predicted_ns"] = alone + ahead_ns
        return row

    def _in_transfer(self) -> dict[str, list[tuple[RoomRecord, int]]]:
        """Returns the rooms in transfer to each peer, by its name, with their tokens."""
        telemetry = self._parts.telemetry
        tokens = telemetry.transfers.in_transfer()
        found: dict[str, list[tuple[RoomRecord, int]]] = {}
        for record in telemetry.rooms.active():
            if record.room in tokens:
                for name in record.peers.copy():
                    found.setdefault(name, []).append((record, tokens[record.room]))
        return found

    def _queued_bytes(self, peer: Peer, rooms: Sequence[tuple[RoomRecord, int]]) -> int | None:
        """Returns the bytes of rooms in transfer to a peer that this rank has not sent yet; None if unknown."""
        inputs = peer.inputs
        if inputs is None:
            return None
        queued = 0.0
        for record, tokens in rooms:
            if not record.planned:
                continue
            pages = -(-tokens // inputs.page_size)
            slices = slices_of_writer(inputs, record.room, peer.coord.dp, self._parts.local.unique_rank)
            nbytes = sum(each.payload_bytes(pages) for each in slices if not each.table)
            queued += nbytes * (1 - min(1.0, (record.sent or 0) / record.planned))
        return round(queued)

    def _calibrated(self, peer: Peer, tokens: int) -> tuple[str, float, float] | None:
        """Returns path, time in ns and rate in bytes per second of a prompt by the calibrated costs; None without."""
        parts, chooser, inputs, info = self._parts, self._parts.chooser, peer.inputs, peer.info
        if inputs is None or info is None or chooser.connection is None or chooser.copy is None or tokens == 0:
            return None
        connections = parts.connections
        direct = connections.reaches(peer.name)
        if direct and chooser.direct is None:
            return None
        pages = -(-tokens // inputs.page_size)
        total_us, path, nbytes = 0.0, "", 0
        for share in self._own_slices(inputs, peer):
            for first in range(0, pages, inputs.chunk_pages):
                # Pages that do not follow each other, as in a pool that has served for a while.
                dst_pages = np.arange(0, 2 * min(inputs.chunk_pages, pages - first), 2, dtype=np.int32)
                part = share, share.num_layers, dst_pages, direct, connections.runs(peer.name, share)
                path = chooser.choose(info.ring_bytes, *part)
                cost_us = chooser.costs(*part).get(path)
                if cost_us is None:  # the configured path is not possible here
                    return None
                total_us += cost_us
                nbytes += share.payload_bytes(len(dst_pages))
        total = prompt_bytes(inputs, peer.coord.dp, parts.local.coord.dp, tokens)
        if not nbytes or total is None:
            return None
        return path, total_us * 1e3, total / (total_us * 1e-6)

    def _own_slices(self, inputs: PlanInputs, peer: Peer) -> TransferSlices:
        """Returns the KV slices of this rank of a room for which it is elected; () if it never is."""
        local = self._parts.local
        for room in range(local.coord.dp, local.coord.dp + _ROOM_NUMBERS * inputs.prefill.dp, inputs.prefill.dp):
            slices = slices_of_writer(inputs, room, peer.coord.dp, local.unique_rank)
            if slices:
                return tuple(each for each in slices if not each.table)
        return ()


def prompt_bytes(inputs: PlanInputs, decode_dp: int, prefill_dp: int, tokens: int) -> int | None:
    """Returns the KV bytes that a prefill instance sends a decode dp group for a prompt; None if there is no plan.

    State and the page tables of KV groups, whose size depends on the engine, are not included.
    """
    try:
        slices = transfer_slices(inputs, prefill_dp, decode_dp)
    except LayoutError:
        return None
    pages = -(-tokens // inputs.page_size)
    # Context-parallel ranks of either side divide the pages of equal slices.
    nbytes: dict[tuple[int, ...], int] = {}
    for each in slices:
        reader = inputs.decode.coord(each.reader)
        if not each.table:
            key = reader.pp, reader.tp, each.segment, each.layer_lo, each.layer_hi, each.dst_head
            nbytes[key] = each.payload_bytes(pages)
    return sum(nbytes.values())
