"""How much memory all pools and rings of a fleet may take together, wherever they are.

Lots and rings are sized by one number. On GPUs it is the one at which the fullest GPU is just full, given how much of
every room, and how many of the rings, lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvctl_agent.contract.rig import PlanRequest, Role
from kvctl_agent.layout.side import Side
from kvctl_agent.rig.gpus import Placement, free_bytes
from kvctl_agent.rig.moving import Mover
from kvctl_agent.rig.sizing import GIB, MIB, RING_SHARE, Budget, pool_bytes, rank_bytes

# Contexts, staging buffers, what an engine computes with and other processes need the rest.
GPU_PERCENT = 60


def host_budget(request: PlanRequest) -> Budget:
    """Of pools in host memory: what the bench says."""
    return Budget(request.memory_bytes, 512 * MIB)


def gpu_budget(mover: Mover, placement: Placement, tokens: int, free: Callable[[int], int] = free_bytes) -> Budget:
    """Of pools on GPUs: `GPU_PERCENT` of what is free there.

    Args:
        tokens: of the longest room; how its bytes spread over the ranks hardly depends on it.
        free: bytes that are free on a GPU.

    Raises:
        DeviceError: a GPU cannot be asked.
    """
    decode = mover.inputs[0].decode
    room = max(pool_bytes(mover, instance, tokens) for instance in range(len(mover.inputs)))
    pools = dict.fromkeys(placement.every, 0.0)
    rings = dict.fromkeys(placement.every, 0.0)
    for role, position, nbytes in _rank_shares(mover, tokens):
        gpu = placement.of(role, position)
        pools[gpu] += nbytes / room
        if role == "decode":
            rings[gpu] += 1 / decode.size
    budgets = {}
    for gpu in placement.every:
        filled = ((RING_SHARE - 1) * pools[gpu] + rings[gpu]) / RING_SHARE
        if filled:
            available = free(gpu)
            budgets[gpu] = (int(available * GPU_PERCENT / 100 / filled), available)
    fullest = min(budgets, key=lambda gpu: budgets[gpu][0])
    nbytes, available = budgets[fullest]
    detail = f" ({GPU_PERCENT} % of the {available / GIB:.1f} GiB that are free on GPU {fullest})"
    return Budget(nbytes, 8 * GIB, detail)


def _rank_shares(mover: Mover, tokens: int) -> Iterator[tuple[Role, int, float]]:
    """(role, position on its side, bytes) of every rank for one room; rooms go to instances and dp groups in turn."""
    items = mover.items(tokens)

    def of(role: Role, instance: int, side: Side, turns: int, first: int) -> Iterator[tuple[Role, int, float]]:
        for unique in range(side.size):
            nbytes = rank_bytes(mover, instance, role, side.coord(unique), items)
            yield role, first + unique, nbytes / turns

    first = 0
    for instance, inputs in enumerate(mover.inputs):
        side = inputs.prefill
        yield from of("prefill", instance, side, side.dp * len(mover.inputs), first)
        first += side.size
    yield from of("decode", 0, mover.inputs[0].decode, mover.inputs[0].decode.dp, 0)
