"""GPU placement, memory budgets, and the sizes of the ranks' KV pools and staging rings.

If memory does not hold the requested number of rooms in flight, the number is reduced and a note says so; if it does
not hold a single room, the request is refused. Batches are sized by the total bytes of all pools. On GPUs that total is
the largest at which no GPU exceeds its limit, given its share of every room and the number of rings on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil

from kvctl.lab.ranks.geometry import side_of
from kvctl.lab.ranks.request import PlanRequest, Role
from kvctl.lab.ranks.transfer_volume import TransferVolume
from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.extras import install
from kvctl_agent.device import driver
from kvctl_agent.errors import ConfigError, DeviceUnavailable, LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards

MIB = 1 << 20
GIB = 1 << 30
# CUDA contexts, staging buffers, the synthetic forward and other processes need the rest of a GPU.
GPU_PERCENT = 60
# All rings together get at most 1/4 of the memory; pools get the rest.
_RING_DIVISOR = 4
_MAX_HOST_RING_BYTES = 512 * MIB
_MAX_GPU_RING_BYTES = 8 * GIB


@dataclass(frozen=True, slots=True)
class Placement:
    """Assigns GPUs to ranks: the ranks of each side use its GPUs round-robin. Empty if pools are in host memory."""

    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()

    def of(self, role: Role, position: int) -> int:
        """Returns the GPU number of a rank, or HOST.

        Args:
            position: number of the rank among all ranks of its role, over all prefill instances.
        """
        gpus = self.prefill if role == "prefill" else self.decode
        return gpus[position % len(gpus)] if gpus else HOST

    @property
    def every(self) -> list[int]:
        """Numbers of all GPUs in use, ascending."""
        return sorted({*self.prefill, *self.decode})


def place(request: PlanRequest) -> Placement:
    """Chooses the GPUs of a fleet.

    Raises:
        ConfigError: a named GPU does not exist, or options of GPUs are given for pools in host memory.
        DeviceUnavailable: the pools belong on GPUs, but there is no GPU or no Triton.
    """
    options = (("--prefill-gpus", request.prefill_gpus), ("--decode-gpus", request.decode_gpus))
    if request.device != "cuda":
        sms = () if request.direct_sms is None else (request.direct_sms,)
        for option, numbers in (*options, ("--direct-sms", sms)):
            if numbers:
                raise ConfigError(f"{option} {_listed(numbers)}: pools are in host memory; give --device cuda")
        return Placement()
    count = count_gpus()
    for option, gpus in options:
        absent = [gpu for gpu in gpus if not 0 <= gpu < count]
        if absent:
            present = "only GPU 0" if count == 1 else f"only GPUs 0 to {count - 1}"
            raise ConfigError(f"{option} {_listed(gpus)}: this machine has no GPU {_listed(absent)}, {present}")
    half = count // 2
    first, rest = (tuple(range(half)), tuple(range(half, count))) if half else ((0,), (0,))
    return Placement(request.prefill_gpus or first, request.decode_gpus or rest)


def count_gpus() -> int:
    """Returns the number of GPUs visible to this process.

    Raises:
        DeviceUnavailable: there is no GPU, or Triton is not installed.
    """
    if find_spec("triton") is None:
        raise DeviceUnavailable(f"a KV pool on a GPU needs Triton, which compiles the copy kernel: {install('gpu')}")
    return int(driver.checked(driver.load().cuDeviceGetCount(), "GPUs cannot be counted"))


def free_bytes(gpu: int) -> int:
    """Returns the free bytes of a GPU, not counting the memory that one CUDA context takes.

    Raises:
        DeviceUnavailable: there is no driver or no GPU.
        DeviceError: there is no GPU of this number, or it cannot be queried.
    """
    label = f"GPU {gpu}"
    device = driver.checked(driver.load().cuDeviceGet(gpu), label)
    context = driver.Context(device, label)
    try:
        with context.visit():
            free, _ = driver.checked(driver.load().cuMemGetInfo(), f"{label}: its free memory cannot be read")
    finally:
        driver.load().cuDevicePrimaryCtxRelease(device)  # the ranks need the memory that a context takes
    return int(free)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for the memory of a fleet.

    Attributes:
        pool_bytes: limit for all KV pools together.
        ring_bytes: limit for one staging ring.
        room_bytes: limit for all pools together if they hold only one room; may include the memory set aside for rings.
        detail: origin of the limits, appended to messages that name them; may be "".
    """

    pool_bytes: int
    ring_bytes: int
    room_bytes: int
    detail: str = ""


def host_budget(request: PlanRequest) -> Budget:
    """Divides `memory_bytes` of the request between pools and rings in host memory."""
    rings = request.memory_bytes // _RING_DIVISOR
    ring = min(_MAX_HOST_RING_BYTES, rings // side_of(request.decode).size)
    return Budget(request.memory_bytes - rings, ring, request.memory_bytes)


def gpu_budget(
    request: PlanRequest,
    volume: TransferVolume,
    placement: Placement,
    tokens: int,
    free: Callable[[int], int] = free_bytes,
) -> Budget:
    """Divides `GPU_PERCENT` of the free memory of the GPUs between pools and rings.

    Args:
        tokens: prompt length used to calculate the bytes of a room on each GPU; the result hardly depends on it.

    Raises:
        DeviceError: a GPU cannot be queried.
    """
    room = max(pool_bytes(volume, instance, tokens) for instance in range(len(volume.inputs)))
    parts = dict.fromkeys(placement.every, 0.0)
    rings = dict.fromkeys(placement.every, 0)
    for role, position, nbytes in _room_bytes_by_rank(volume, tokens):
        gpu = placement.of(role, position)
        parts[gpu] += nbytes / room
        rings[gpu] += role == "decode"
    used = [gpu for gpu in placement.every if parts[gpu]]
    available = {gpu: free(gpu) for gpu in used}
    usable = {gpu: available[gpu] * GPU_PERCENT // 100 for gpu in used}
    ring = min([_MAX_GPU_RING_BYTES, *(usable[gpu] // _RING_DIVISOR // rings[gpu] for gpu in used if rings[gpu])])
    reserved = ring if request.ring_mb is None else request.ring_mb * MIB
    pools = {gpu: int((usable[gpu] - reserved * rings[gpu]) / parts[gpu]) for gpu in used}
    fullest = min(used, key=lambda gpu: pools[gpu])
    detail = f" ({GPU_PERCENT} % of the {available[fullest] / GIB:.1f} GiB that are free on GPU {fullest})"
    most = max(0, pools[fullest])
    return Budget(most, ring, most, detail)


def _room_bytes_by_rank(volume: TransferVolume, tokens: int) -> Iterator[tuple[Role, int, float]]:
    """Yields (role, position among the ranks of its role, average bytes per room) of every rank.

    Rooms go to the instances and dp groups in rotation, so the average includes the rooms that other groups hold.
    """

    def of(
        role: Role, instance: int, side: ParallelConfig, turns: int, first: int
    ) -> Iterator[tuple[Role, int, float]]:
        items = volume.items(tokens, role)
        for unique in range(side.size):
            nbytes = rank_bytes(volume, instance, role, side.coord(unique), items)
            yield role, first + unique, nbytes / turns

    first = 0
    for instance, inputs in enumerate(volume.inputs):
        side = inputs.prefill
        yield from of("prefill", instance, side, side.dp * len(volume.inputs), first)
        first += side.size
    yield from of("decode", 0, volume.inputs[0].decode, volume.inputs[0].decode.dp, 0)


def check_room_fits(budget: Budget, volume: TransferVolume, tokens: int) -> int:
    """Returns the bytes of a room in all pools together, for the prefill instance that needs the most.

    Raises:
        LayoutError: the budget does not hold one room.
    """
    nbytes = max(pool_bytes(volume, instance, tokens) for instance in range(len(volume.inputs)))
    if nbytes > budget.room_bytes:
        raise LayoutError(
            f"one room of {tokens} tokens needs {nbytes} bytes of KV pools, prefill and decode together, but only "
            f"{budget.room_bytes} bytes are available{budget.detail}: use fewer --tokens or a smaller shape"
        )
    return nbytes


def pool_bytes(volume: TransferVolume, instance: int, tokens: int) -> int:
    """Returns the bytes of a room in the pools of all ranks that hold it: one prefill and one decode dp group."""
    inputs = volume.inputs[instance]
    sides: tuple[tuple[Role, ParallelConfig], ...] = (("prefill", inputs.prefill), ("decode", inputs.decode))
    return sum(
        rank_bytes(volume, instance, role, RankCoord(0, pp, cp, tp), volume.items(tokens, role))
        for role, side in sides
        for pp in range(side.pp)
        for cp in range(side.cp)
        for tp in range(side.tp)
    )


def rank_bytes(volume: TransferVolume, instance: int, role: Role, at: RankCoord, items: Sequence[int]) -> int:
    """Returns the bytes that a number of pages takes in one rank's pool.

    Args:
        items: number of pages of each segment, or of items for a state component.
    """
    inputs = volume.inputs[instance]
    side = inputs.prefill if role == "prefill" else inputs.decode
    return sum(
        shard.num_layers * shard.heads * shard.segment.page_head_bytes * count
        for shard, count in zip(local_shards(inputs.shape, volume.page_size(role), side, at), items, strict=True)
    )


def ring_bytes(
    request: PlanRequest, budget: Budget, volume: TransferVolume, longest: Sequence[tuple[int, int]], wanted: int
) -> int:
    """Returns the size of each decode rank's staging ring in bytes.

    The size is that of `--ring-mb`; without it, `wanted` limited by the budget, but at least one part.

    Args:
        longest: (tokens, cached tokens) of the longest room of each load.
        wanted: staged bytes of all rooms that one decode rank has in flight, plus one more room.

    Raises:
        LayoutError: `--ring-mb` is smaller than one part.
    """
    instances = range(len(volume.inputs))
    largest = (volume.largest_part(instance, *room) for instance in instances for room in longest)
    part_bytes, arithmetic = max(largest, key=lambda part: part[0])
    if request.ring_mb is None:
        return max(1, ceil(max(part_bytes, min(wanted, budget.ring_bytes)) / MIB)) * MIB
    if request.ring_mb * MIB < part_bytes:
        raise LayoutError(
            f"--ring-mb {request.ring_mb} is smaller than one part: {arithmetic} need {part_bytes} bytes, the ring has "
            f"{request.ring_mb * MIB}; give --ring-mb {-(-part_bytes // MIB)} or more, or a smaller --chunk-tokens"
        )
    return request.ring_mb * MIB


def _listed(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
