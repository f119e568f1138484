"""How much memory all pools and rings of a fleet may take together, wherever they are.

Lots are sized by one number for all pools. On GPUs it is the one at which the fullest GPU is just full, given how much
of every room lies there and how many of the rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvctl.lab.ranks.bench_messages import PlanRequest, Role
from kvctl.lab.ranks.gpus import Placement, free_bytes
from kvctl.lab.ranks.resolve import side_of
from kvctl.lab.ranks.sizing import GIB, MIB, Budget, pool_bytes, rank_bytes
from kvctl.lab.ranks.transfer_volume import TransferVolume
from kvctl_agent.layout.parallel import ParallelConfig

# Contexts, staging buffers, what an engine computes with and other processes need the rest.
GPU_PERCENT = 60
# Rings together get at most this part of the memory, pools the rest.
_RING_SHARE = 4
_HOST_RING_BYTES = 512 * MIB
_GPU_RING_BYTES = 8 * GIB


def host_budget(request: PlanRequest) -> Budget:
    """Of pools in host memory: what the bench says."""
    rings = request.memory_bytes // _RING_SHARE
    ring = min(_HOST_RING_BYTES, rings // side_of(request.decode).size)
    return Budget(request.memory_bytes - rings, ring, request.memory_bytes)


def gpu_budget(
    request: PlanRequest,
    mover: TransferVolume,
    placement: Placement,
    tokens: int,
    free: Callable[[int], int] = free_bytes,
) -> Budget:
    """Of pools on GPUs: `GPU_PERCENT` of what is free there.

    Args:
        tokens: of the longest room; how its bytes spread over the ranks hardly depends on it.
        free: bytes that are free on a GPU.

    Raises:
        DeviceError: a GPU cannot be asked.
    """
    room = max(pool_bytes(mover, instance, tokens) for instance in range(len(mover.inputs)))
    parts = dict.fromkeys(placement.every, 0.0)
    rings = dict.fromkeys(placement.every, 0)
    for role, position, nbytes in _rank_shares(mover, tokens):
        gpu = placement.of(role, position)
        parts[gpu] += nbytes / room
        rings[gpu] += role == "decode"
    used = [gpu for gpu in placement.every if parts[gpu]]
    available = {gpu: free(gpu) for gpu in used}
    usable = {gpu: available[gpu] * GPU_PERCENT // 100 for gpu in used}
    ring = min([_GPU_RING_BYTES, *(usable[gpu] // _RING_SHARE // rings[gpu] for gpu in used if rings[gpu])])
    taken = ring if request.ring_mb is None else request.ring_mb * MIB
    pools = {gpu: int((usable[gpu] - taken * rings[gpu]) / parts[gpu]) for gpu in used}
    fullest = min(used, key=lambda gpu: pools[gpu])
    detail = f" ({GPU_PERCENT} % of the {available[fullest] / GIB:.1f} GiB that are free on GPU {fullest})"
    most = max(0, pools[fullest])
    return Budget(most, ring, most, detail)


def _rank_shares(mover: TransferVolume, tokens: int) -> Iterator[tuple[Role, int, float]]:
    """(role, position on its side, bytes) of every rank for one room; rooms go to instances and dp groups in turn."""
    items = mover.items(tokens)

    def of(
        role: Role, instance: int, side: ParallelConfig, turns: int, first: int
    ) -> Iterator[tuple[Role, int, float]]:
        for unique in range(side.size):
            nbytes = rank_bytes(mover, instance, role, side.coord(unique), items)
            yield role, first + unique, nbytes / turns

    first = 0
    for instance, inputs in enumerate(mover.inputs):
        side = inputs.prefill
        yield from of("prefill", instance, side, side.dp * len(mover.inputs), first)
        first += side.size
    yield from of("decode", 0, mover.inputs[0].decode, mover.inputs[0].decode.dp, 0)
