"""Processor cores that a process may use, and the number of threads that copy and post writes on them."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

FEW_CORES = 4
"""With at most this many cores, ranks that share a host have none to spare."""

_MOST_THREADS = 8


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that this process may use: its CPU affinity, limited by the quota of its cgroups.

    A quota of a fraction of a core counts as a whole core. Files that cannot be read impose no limit.

    Args:
        root: directory that contains `proc` and `sys`.
    """
    quotas = [
        quota
        for line in _lines(root / "proc/self/cgroup")
        for directory in _directories(root / "sys/fs/cgroup", line)
        if (quota := _quota(directory)) is not None
    ]
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def engine_threads(cores: int, ranks: int) -> int:
    """Returns the number of threads that post the writes of a prefill rank with its KV pool in host memory; 0: none.

    A rank gets its share of the cores, at most 8 threads, or none if that is less than two: one thread copies no faster
    than the thread that calls the transport. Each of several ranks leaves half of its share, if four threads remain:
    their engines wait for the slowest of them, and need cores too. Measured with 1,024-token rooms, pages of 32 KiB
    (TP4: 8 KiB):

    - 64 cores, TP1 -> TP1: none 3.7 GB/s, 4 threads 12.7, 8 threads 21.3, with half the CPU time of none.
    - 64 cores, TP4 -> TP4, all eight ranks on the host: none 7.6 GB/s, 4 threads 22.4, 8 threads 26.7.
    - 32 cores, the same: 4 threads 26.8 GB/s, 8 threads 29.8. Inside SGLang's queues, 4 threads 20.5 GB/s and
      p50 20 ms, 8 threads 16.0 GB/s and 27 ms.
    - 4 cores, TP1 -> TP1: none 4 GB/s, 4 threads 9.6 to 12.8. 3 cores: none 4 GB/s, 3 threads 7.9 to 10.3.
    - 2 cores, TP1 -> TP1: none 4.0 to 5.1 GB/s, 2 threads 6.2 to 7.7.

    With few cores, the threads take all of them, and on two cores half of the time of an engine's thread that computes,
    so they are not used then (`CopyPool`).

    Args:
        cores: cores that the rank may use (`available_cores`).
        ranks: ranks that share these cores. A rank knows only the size of its own instance, and assumes that all of the
            instance is on its host: an instance on several hosts gets fewer threads than the cores permit.
    """
    share = cores // ranks
    if ranks > 1:
        share = max(min(share, 4), share // 2)
    threads = min(_MOST_THREADS, share)
    return threads if threads > 1 else 0


def copy_threads(cores: int, ranks: int) -> int:
    """Returns the number of threads of a rank that gather and scatter in host memory; 0: the control loop copies.

    Half of the rank's share of the cores, because the threads that post use the same cores; at most 8 and, so that the
    loop does not copy, at least one.

    Args:
        cores: cores that the rank may use (`available_cores`).
        ranks: ranks that share these cores.
    """
    return max(1, min(_MOST_THREADS, cores // ranks // 2)) if cores > FEW_CORES else 0


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _directories(mount: Path, line: str) -> list[Path]:
    """Returns the directories whose quotas apply to a line of /proc/self/cgroup: that of the cgroup and its parents."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return []
    own = PurePosixPath(path.lstrip("/"))
    return [mount / controllers / each for each in (own, *own.parents)]


def _quota(directory: Path) -> float | None:
    """Returns the quota of a cgroup in cores; None if it has none."""
    limits = " ".join(_lines(directory / "cpu.max")).split()  # version 2
    if not limits:
        limits = [word for name in ("quota", "period") for word in _lines(directory / f"cpu.cfs_{name}_us")]
    if len(limits) != 2 or not all(limit.isdecimal() for limit in limits):  # "max", or -1 in version 1
        return None
    quota, period = map(int, limits)
    return quota / period if period else None
