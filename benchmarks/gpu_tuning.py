"""Measures variants of the copy kernel (tile size, warps) on this GPU and prints their durations, fastest first.

Usage: python benchmarks/gpu_tuning.py [--repeats N] [--case N ...]

Cases and durations are those of gpu_copies.py. The fastest variant belongs in `kvctl_agent/device/row_copies.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_copies import CASES, Bench, timed
from kvctl_agent.device.cuda import CudaDevice, open_device
from kvctl_agent.device.kernels import Tile
from kvctl_agent.device.row_copies import CudaRowCopies, Tuning
from kvctl_agent.errors import DeviceError
from kvctl_agent.memory.device_copier import DeviceCopier

KIB = (4, 8, 16, 32, 64)
WARPS = (2, 4, 8, 16)
ACCESSES = (2, 16)  # fewest and most accesses of a lane


def tunings() -> Iterator[Tuning]:
    """Yields every combination of tile size and warps for which a lane makes from 2 to 16 accesses."""
    for kib, warps in product(KIB, WARPS):
        if ACCESSES[0] <= (kib << 10) // (warps * 32 * 16) <= ACCESSES[1]:
            yield Tuning(tile=Tile(kib << 10, warps))


def measure(device: CudaDevice, bench: Bench, tuning: Tuning, repeats: int) -> tuple[float, float]:
    """Returns the median (wall, host) durations of a copy with this tuning, in µs."""
    bench.copier.close()
    bench.copier = DeviceCopier(CudaRowCopies(device.context, device.kernels, device.events, tuning))
    bench.copier.prepare(bench.memory, 0, bench.case.heads)
    took = timed(bench.begin, repeats)
    return took.wall_us, took.host_us


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50, help="of each form in each case")
    parser.add_argument("--case", type=int, nargs="+", default=[1, 3, 6, 7], help="numbers of cases, from 0")
    arguments = parser.parse_args()
    try:
        device = open_device(0)
    except DeviceError as error:
        print(f"gpu_tuning: {error}", file=sys.stderr)
        return 3
    for number in arguments.case:
        with closing(Bench(device, CASES[number])) as bench:
            found = sorted((*measure(device, bench, each, arguments.repeats), each) for each in tunings())
        print(f"{CASES[number].name}\n{'tile':>10}{'warps':>7}{'µs':>8}{'host µs':>9}")
        for wall, host, tuning in found:
            print(f"{tuning.tile.nbytes >> 10:>6} KiB{tuning.tile.warps:>7}{wall:>8.1f}{host:>9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
