"""The amounts that a combination must transfer, from the plan alone, for comparison with the counters."""

from __future__ import annotations

from typing import NamedTuple

from kvctl.lab.ranks.geometry import state_items
from kvctl_agent.layout.chunks import chunk_pages, page_count
from kvctl_agent.layout.parallel import local_shards
from kvctl_agent.layout.plan import TransferSlice, state_slices_to_reader, transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from tests.matrix.matrix_rig.case import Case
from tests.matrix.matrix_rig.loads import PREFILL_ONLY, groups_of, rooms_of
from tests.matrix.matrix_rig.models import MODELS, shape_of


class Expected(NamedTuple):
    """Sums over all rooms and ranks.

    Attributes:
        parts: of KV and draft; layer groups count separately.
        kv_bytes: of these parts.
        state_bytes: of per-request state.
        largest_part_bytes: the smallest possible ring.
    """

    parts: int
    kv_bytes: int
    state_bytes: int
    largest_part_bytes: int


def expected(case: Case) -> Expected:
    """Sums the transfers from every writer to every reader."""
    page = case.page_size
    parts = kv_bytes = state_bytes = largest = 0
    for room in rooms_of(case):
        inputs = _inputs(case, room.instance)
        pages, cached = page_count(room.tokens, page), room.prefix_tokens // page
        for share in transfer_slices(inputs, room.number, room.decode_dp) if room.index != PREFILL_ONLY else ():
            cells = writer_cells(inputs, room.number, share.writer, share.reader, pages, cached)
            groups = _groups(case, inputs, share)
            parts += len(cells) * len(groups)
            largest = max(largest, *(share.part_bytes(cell.count, layers) for cell in cells for layers in groups), 0)
            kv_bytes += sum(share.payload_bytes(cell.count) for cell in cells)
        for reader in range(case.decode.size):
            if case.decode.coord(reader).dp != room.decode_dp:
                continue
            for share in state_slices_to_reader(inputs, room.number, reader):
                name = inputs.segments[share.segment].name
                (state,) = (state for state in MODELS[case.model]["states"] if state["name"] == name)
                state_bytes += share.payload_bytes(state_items(state, room.tokens, page))
    return Expected(parts, kv_bytes, state_bytes, largest)


def _inputs(case: Case, instance: int) -> PlanInputs:
    return PlanInputs(
        shape=shape_of(case.model, case.page_size),
        page_size=case.page_size,
        chunk_pages=chunk_pages(case.chunk_tokens, case.page_size),
        prefill=case.prefill[instance],
        decode=case.decode,
        cp_mode=case.cp_mode,
    )


def _groups(case: Case, inputs: PlanInputs, share: TransferSlice) -> list[int]:
    """Numbers of layers in the layer groups of a transfer slice."""
    if not case.grouped:
        return [share.num_layers]
    mine = local_shards(inputs.shape, inputs.page_size, inputs.prefill, inputs.prefill.coord(share.writer))
    own = [each for each in mine if not each.segment.state and each.num_layers]
    groups = groups_of(range(own[0].layer_lo, own[-1].layer_hi))
    layers = (min(group.stop, share.layer_hi) - max(group.start, share.layer_lo) for group in groups)
    return [count for count in layers if count > 0]
