"""Which GPUs there are, what is free on them, and which one each rank of a fleet uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from kvctl.lab.ranks.bench_messages import PlanRequest, Role
from kvctl_agent.contract.choices import HOST
from kvctl_agent.device import driver
from kvctl_agent.errors import ConfigError, DeviceUnavailable


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of each side, which its ranks take in turn; none: all pools are in host memory."""

    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()

    def of(self, role: Role, position: int) -> int:
        """Number of the GPU of a rank; `position` counts the ranks of its side, all prefill instances together."""
        gpus = self.prefill if role == "prefill" else self.decode
        return gpus[position % len(gpus)] if gpus else HOST

    @property
    def every(self) -> list[int]:
        """All GPUs in use, ascending."""
        return sorted({*self.prefill, *self.decode})


def place(request: PlanRequest) -> Placement:
    """Which GPUs a bench's ranks use.

    Raises:
        ConfigError: GPUs that are not there, or any for pools in host memory.
        DeviceUnavailable: pools shall be on GPUs, and there are none, or what drives them is not installed.
    """
    given = (("--prefill-gpus", request.prefill_gpus), ("--decode-gpus", request.decode_gpus))
    if request.device != "cuda":
        for option, gpus in given:
            if gpus:
                raise ConfigError(f"{option} {_listed(gpus)}: pools are in host memory; give --device cuda")
        return Placement()
    count = count_gpus()
    for option, gpus in given:
        absent = [gpu for gpu in gpus if not 0 <= gpu < count]
        if absent:
            have = "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
            raise ConfigError(f"{option} {_listed(gpus)}: there is no GPU {_listed(absent)} here, but {have}")
    half = count // 2
    first, rest = (tuple(range(half)), tuple(range(half, count))) if half else ((0,), (0,))
    return Placement(request.prefill_gpus or first, request.decode_gpus or rest)


def count_gpus() -> int:
    """GPUs that this process sees, at least one.

    Raises:
        DeviceUnavailable: none, or what pools on them need is not installed.
    """
    if find_spec("triton") is None:
        raise DeviceUnavailable(
            "a KV pool on a GPU needs Triton, which compiles the copy kernel: pip install 'kvctl[gpu]'"
        )
    return int(driver.checked(driver.load().cuDeviceGetCount(), "GPUs cannot be counted"))


def free_bytes(gpu: int) -> int:
    """Free memory of one GPU while one more process has a context on it; the context is released again.

    Raises:
        DeviceUnavailable, DeviceError: there is no such GPU, or it cannot be asked.
    """
    label = f"GPU {gpu}"
    device = driver.checked(driver.load().cuDeviceGet(gpu), label)
    context = driver.Context(device, label)
    try:
        with context.visit():
            free, _ = driver.checked(driver.load().cuMemGetInfo(), f"{label}: its memory cannot be asked for")
    finally:
        driver.load().cuDevicePrimaryCtxRelease(device)  # ranks need what a context takes of the GPU
    return int(free)


def _listed(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
