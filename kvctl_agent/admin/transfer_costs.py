"""Calibrated costs of transfers from a prefill rank to its peers, as a document for the admin command `cost`.

Before any room was transferred to a peer, the prediction is the sum of the costs of the prompt's parts, the same
by which `auto` chooses paths: the costs of this rank alone, without the other ranks of its instance that may share its
cores. They are a fixed time and a time per page, from the costs of one page and of a whole chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.plan import TransferSlices, slices_of_writer, transfer_slices
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.observer.documents import CalibratedCost, PeerCost
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol.peer import Peer

_ROOM_NUMBERS = 64  # a writer may be elected for a share of the rooms only
_MOST_KEPT = 64


class CalibratedCosts:
    """Builder of the document `COSTS`.

    The cost, which takes a quarter of a millisecond, is kept until the calibration changes: decode ranks mostly have
    the same layout.
    """

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._kept: dict[Any, CalibratedCost | None] = {}

    def __call__(self) -> Iterator[Mapping[str, Any]]:
        yield {}
        for peer in list(self._parts.machine.peers.values()):
            yield self._row(peer)

    def _row(self, peer: Peer) -> PeerCost:
        inputs, local = peer.inputs, self._parts.local
        own = self._own_slices(inputs, peer) if inputs is not None else ()
        return {
            "peer": peer.name,
            "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
            "rank": {**peer.coord._asdict(), "unique": peer.info.unique_rank} if peer.info is not None else None,
            "state": peer.state.value,
            "reason": None if peer.usable else f"{peer.name} is {peer.state}",
            "page_tokens": inputs.page_size if inputs is not None else 0,
            "page_bytes": page_bytes(inputs, peer.coord.dp, local.coord.dp) if inputs is not None else None,
            "own_page_bytes": sum(each.payload_bytes(1) for each in own),
            "calibrated": self._calibrated(peer, inputs, own) if inputs is not None else None,
        }

    def _calibrated(self, peer: Peer, inputs: PlanInputs, own: TransferSlices) -> CalibratedCost | None:
        chooser, connections = self._parts.chooser, self._parts.connections
        direct = connections.reaches(peer.name)
        if peer.info is None or chooser.model is None or not own:
            return None
        alike = tuple(replace(each, writer=0, reader=0) for each in own)
        runs = tuple(connections.runs(peer.name, each) for each in own)
        calibrated = chooser.model, chooser.path, chooser.staging
        key = calibrated, alike, runs, direct, peer.info.ring_bytes, inputs.chunk_pages
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            rank = peer.info.ring_bytes, peer.name, direct
            page, chunk = (self._chunk(own, pages, *rank) for pages in (1, inputs.chunk_pages))
            self._kept[key] = None
            if page is not None and chunk is not None:
                ns_per_page = chunk[0] * 1e3 / inputs.chunk_pages
                fixed_ns = max(0.0, page[0] * 1e3 - ns_per_page)
                self._kept[key] = {"path": chunk[1], "fixed_ns": fixed_ns, "ns_per_page": ns_per_page}
        return self._kept[key]

    def _chunk(
        self, own: TransferSlices, pages: int, ring_bytes: int, peer: str, direct: bool
    ) -> tuple[float, str] | None:
        """Returns time in µs of a chunk, and path of its last part; None if the configured path is not possible."""
        chooser, connections = self._parts.chooser, self._parts.connections
        # Pages that do not follow each other, as in a pool that has served for a while.
        dst_pages = np.arange(0, 2 * pages, 2, dtype=np.int32)
        total_us, path = 0.0, ""
        for share in own:
            part = share, share.num_layers, dst_pages, direct, connections.runs(peer, share)
            path = chooser.choose(ring_bytes, *part)
            cost_us = chooser.costs(*part).get(path)
            if cost_us is None:
                return None
            total_us += cost_us
        return total_us, path

    def _own_slices(self, inputs: PlanInputs, peer: Peer) -> TransferSlices:
        """Returns the KV slices of this rank of a room for which it is elected; () if it never is."""
        local = self._parts.local
        for room in range(local.coord.dp, local.coord.dp + _ROOM_NUMBERS * inputs.prefill.dp, inputs.prefill.dp):
            slices = slices_of_writer(inputs, room, peer.coord.dp, local.unique_rank)
            if slices:
                return tuple(each for each in slices if not each.table)
        return ()


def page_bytes(inputs: PlanInputs, decode_dp: int, prefill_dp: int) -> int | None:
    """Returns the KV bytes that a prefill instance sends a decode dp group for each page of a prompt; None: no plan.

    State and the page tables of KV groups, whose size depends on the engine, are not included.
    """
    try:
        slices = transfer_slices(inputs, prefill_dp, decode_dp)
    except LayoutError:
        return None
    # Context-parallel ranks of either side divide the pages of equal slices.
    nbytes: dict[tuple[int, ...], int] = {}
    for each in slices:
        reader = inputs.decode.coord(each.reader)
        if not each.table:
            key = reader.pp, reader.tp, each.segment, each.layer_lo, each.layer_hi, each.dst_head
            nbytes[key] = each.payload_bytes(1)
    return sum(nbytes.values())
