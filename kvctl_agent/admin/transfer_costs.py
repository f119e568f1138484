"""Sizes of transfers from a prefill rank to its peers, as a document for the admin command `cost`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.plan import slices_of_writer, transfer_slices
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.observer.documents import PeerCost
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol.peer import LocalInfo, Peer

_ROOM_NUMBERS = 64  # a writer may be elected for a share of the rooms only


def peer_costs(parts: AgentParts) -> Iterator[Mapping[str, Any]]:
    """Yields the pieces of the document `COSTS`."""
    yield {}
    for peer in list(parts.machine.peers.values()):
        yield _row(peer, parts.local)


def _row(peer: Peer, local: LocalInfo) -> PeerCost:
    inputs = peer.inputs
    return {
        "peer": peer.name,
        "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
        "rank": {**peer.coord._asdict(), "unique": peer.info.unique_rank} if peer.info is not None else None,
        "state": peer.state.value,
        "reason": None if peer.usable else f"{peer.name} is {peer.state}",
        "page_tokens": inputs.page_size if inputs is not None else 0,
        "page_bytes": page_bytes(inputs, peer.coord.dp, local.coord.dp) if inputs is not None else None,
        "own_page_bytes": _own_page_bytes(inputs, peer, local) if inputs is not None else 0,
    }


def _own_page_bytes(inputs: PlanInputs, peer: Peer, local: LocalInfo) -> int:
    """Returns the KV bytes that this rank sends for each page of a room for which it is elected; 0 if it never is."""
    for room in range(local.coord.dp, local.coord.dp + _ROOM_NUMBERS * inputs.prefill.dp, inputs.prefill.dp):
        if slices := slices_of_writer(inputs, room, peer.coord.dp, local.unique_rank):
            return sum(each.payload_bytes(1) for each in slices if not each.table)
    return 0


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
