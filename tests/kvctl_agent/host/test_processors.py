from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvctl_agent.host.processors import available_cores, copy_threads, engine_threads


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


@pytest.mark.usefixtures("affinity")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"proc/self/cgroup": "0::/\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "1000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/pod\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "600000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
    ],
)
def test_cores_are_the_affinity_within_the_quotas(files: Mapping[str, str], cores: int, tmp_path: Path) -> None:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert available_cores(tmp_path) == cores


def test_this_machine_has_cores() -> None:
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [
        *[(1, 1, 0), (2, 1, 2), (2, 2, 0), (4, 1, 4), (4, 2, 2), (8, 1, 8), (16, 1, 8), (192, 1, 8)],
        *[
            (64, 4, 8),
            (64, 8, 4),
            (64, 16, 4),
            (64, 64, 0),
            (32, 4, 4),
            (32, 8, 4),
            (16, 4, 4),
            (48, 4, 6),
            (16, 8, 2),
            (8, 8, 0),
            (8, 16, 0),
        ],
    ],
)
def test_threads_are_the_ranks_share_of_the_cores(cores: int, ranks: int, threads: int) -> None:
    assert engine_threads(cores, ranks) == threads


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 0), (4, 1, 0), (5, 1, 2), (8, 8, 1), (16, 4, 2), (64, 4, 8), (192, 1, 8)]
)
def test_a_rank_has_at_least_one_copy_thread_where_cores_are_not_few(cores: int, ranks: int, threads: int) -> None:
    assert copy_threads(cores, ranks) == threads


def test_the_threads_of_all_ranks_never_exceed_the_cores() -> None:
    for cores in range(1, 257):
        for ranks in range(1, 65):
            assert ranks * engine_threads(cores, ranks) <= cores
