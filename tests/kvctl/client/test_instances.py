"""Ranks are assigned to the instances that an operator would call them by."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.client.instances import instances, name_stem
from kvctl.client.names import natural_key

ONE = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}


def rank(name: str, host: str = "n1", registry: str | None = None, unique: int = 0, **sizes: int) -> dict[str, Any]:
    whole = {**ONE, **sizes}
    place = dict.fromkeys(whole, 0) | {"unique": unique}
    return {
        "name": name,
        "host": host,
        "role": "prefill" if "prefill" in name else "decode",
        "rank": place,
        "sizes": whole,
        "registry": registry,
    }


@pytest.mark.parametrize(
    ("name", "place", "sizes", "stem"),
    [
        ("prefill-3", {"unique": 3}, {"tp": 8}, "prefill"),
        ("p1-prefill-0", {"unique": 0}, {"tp": 2}, "p1-prefill"),
        ("prefill-1", {"unique": 0}, {}, "prefill-1"),
        ("prefill-1", {"unique": 0}, {"tp": 8}, "prefill-1"),
        ("decode-dp1-tp0@10.0.0.5:30000", {"unique": 2, "dp": 1}, {"dp": 2, "tp": 2}, "decode@10.0.0.5:30000"),
        ("prefill-pp0-cp1-tp3@a:1", {"unique": 7, "cp": 1}, {"pp": 2, "cp": 2, "tp": 4}, "prefill@a:1"),
        # vLLM's data-parallel ranks are instances of their own.
        ("decode-dp1-tp0@n1:4f2a", {"unique": 0}, {}, "decode-dp1@n1:4f2a"),
        ("prefill-3@n1", {"unique": 3}, {"tp": 8}, "prefill"),
        ("prefill-3#c0ffee", {"unique": 3}, {"tp": 8}, "prefill"),
        ("prefill-tp3@n1", {"unique": 3}, {"tp": 8}, "prefill"),
        ("worker", {"unique": 0}, {"tp": 8}, "worker"),
    ],
)
def test_the_stem_of_a_name(name: str, place: dict[str, int], sizes: dict[str, int], stem: str) -> None:
    status = rank(name, **sizes)
    status["rank"] |= place
    assert name_stem(status) == stem


def test_ranks_of_several_hosts_are_one_instance_if_no_coordinates_are_equal() -> None:
    ranks = [rank(f"decode-{n}", "n1" if n < 4 else "n2", unique=n, tp=8) for n in range(8)]
    assert set(instances(ranks)) == {"decode"}


def test_equal_names_on_two_hosts_are_two_instances() -> None:
    ranks = [rank(f"decode-{n}@{host}", host, unique=n, tp=2) for host in ("n10", "n2") for n in range(2)]
    assert instances(ranks) == ["decode@n10", "decode@n10", "decode@n2", "decode@n2"]


def test_a_host_with_half_an_instance_does_not_take_ranks_of_a_whole_one() -> None:
    half = [rank(f"decode-{n}@n1", "n1", unique=n, tp=4) for n in range(2)]
    whole = [rank(f"decode-{n}@n2", "n2", unique=n, tp=4) for n in range(4)]
    assert instances([*half, *whole]) == ["decode@n1"] * 2 + ["decode@n2"] * 4


def test_the_registry_tells_prefill_instances_apart_and_joins_hosts() -> None:
    ranks = [
        rank("prefill-0", "n1", "tcp://10.0.0.1:4999", 0, tp=2),
        rank("prefill-1", "n2", "tcp://10.0.0.1:4999", 1, tp=2),
        rank("prefill-0", "n1", "tcp://10.0.0.1:5999", 0, tp=2),
        rank("prefill-1", "n2", "tcp://10.0.0.1:5999", 1, tp=2),
    ]
    assert instances(ranks) == [*["prefill@10.0.0.1:4999"] * 2, *["prefill@10.0.0.1:5999"] * 2]


@pytest.mark.parametrize("registry", ["tcp://127.0.0.1:4999", "tcp://[::1]:4999", "ipc:///tmp/r"])
def test_equal_local_registries_of_two_hosts_are_two(registry: str) -> None:
    ranks = [rank(f"prefill-{unique}", host, registry, unique, tp=2) for unique, host in enumerate(("n1", "n2"))]
    assert instances(ranks) == ["prefill@n1", "prefill@n2"]


def test_role_and_sizes_tell_instances_of_one_stem_apart() -> None:
    names = instances([rank("worker-0", unique=0, tp=2), rank("worker-0", unique=0, tp=4)])
    assert len(set(names)) == 2


def test_natural_order_of_hosts_and_ranks() -> None:
    names = ["n10", "n2", "decode-10", "decode-9", "rack2-n1", "rack10-n1"]
    assert sorted(names, key=natural_key) == ["decode-9", "decode-10", "n2", "n10", "rack2-n1", "rack10-n1"]
