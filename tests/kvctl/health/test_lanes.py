"""Which lane carried the bytes of a probe, told by engine, counters of /sys, or rate; and what is known without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.health.lanes import lane_evidence, measured_lane
from kvctl_agent.host.nics import HostNics
from tests.support import host_tree
from tests.support.host_tree import HostTree

MIB = 1 << 20
MOVED = 100 * MIB


class Writer:
    """A prefill rank on a host whose /sys is a tree of the test."""

    def __init__(self, make: Callable[[Path], HostTree], root: Path) -> None:
        self.tree, self.lane = make(root), {"devices": [], "source": "", "protocol": ""}
        self._root = root
        self._before = self.nics()

    def nics(self) -> dict[str, Any]:
        return {"nics": HostNics(self._root).read(), "left_out": 0, "lane": self.lane}

    def measured(self, moved: int | None = MOVED, **peer: Any) -> tuple[str | None, str | None, list[str]]:
        """Returns lane, source and devices of a probe that ends now; `peer` are fields of the row of its peer."""
        others = {"peer": "decode-1", "lane_kind": "cuda_ipc", "lane_source": "rate"}
        after = {"nics": self.nics(), "peers": [others, {"peer": "decode-0", "same_host": False, **peer}]}
        found = measured_lane("decode-0", {"nics": self._before}, after, {"moved_bytes": moved})
        assert found["moved_bytes"] == moved
        return found["lane"], found["lane_source"], sorted(found["carried"])


@pytest.fixture
def rails(tmp_path: Path) -> Writer:
    return Writer(host_tree.eight_rails, tmp_path)


def test_two_rails_carried_them(rails: Writer) -> None:
    rails.tree.carry("mlx5_0", 60 * MIB)
    rails.tree.carry("mlx5_1", 41 * MIB)
    assert rails.measured() == ("rdma", "counters", ["mlx5_0:1", "mlx5_1:1"])


def test_one_of_several_rails_carried_all(rails: Writer) -> None:
    rails.tree.carry("mlx5_3", 102 * MIB)
    assert rails.measured() == ("rdma", "counters", ["mlx5_3:1"])


def test_tcp_on_a_host_with_rdma_is_seen_where_the_rate_suggests_rdma(rails: Writer) -> None:
    rails.tree.carry("eth0", 104 * MIB)
    assert rails.measured(lane_kind="rdma", lane_source="rate") == ("tcp", "counters", ["eth0"])


def test_efa_counts_them(tmp_path: Path) -> None:
    writer = Writer(host_tree.efa, tmp_path)
    writer.tree.set("rdmap62s0", tx_bytes=MOVED)
    assert writer.measured() == ("rdma", "counters", ["rdmap62s0:1"])


def test_traffic_of_others_proves_nothing(rails: Writer) -> None:
    rails.tree.carry("mlx5_0", 200 * MIB)
    assert rails.measured() == (None, "nothing: counters have other traffic", ["mlx5_0:1"])
    assert rails.measured(lane_kind="rdma", lane_source="rate")[:2] == ("rdma", "rate: counters have other traffic")


def test_the_engine_counts_first(rails: Writer) -> None:
    rails.tree.carry("mlx5_0", MOVED)
    assert rails.measured(lane_kind="cuda_ipc", lane_source="engine") == ("cuda_ipc", "engine", ["mlx5_0:1"])
    rails.lane["protocol"] = "tcp"
    assert rails.measured() == ("tcp", "engine", ["mlx5_0:1"]), "of a pool in host memory"


def test_within_a_host_no_device_carries_them(rails: Writer) -> None:
    rails.tree.carry("mlx5_0", 4 * MIB)
    assert rails.measured(same_host=True) == ("shared memory", "counters: no device carried them", [])
    assert rails.measured(same_host=False) == (None, None, [])
    assert rails.measured(same_host=True, lane_kind="cuda_ipc", lane_source="rate")[:2] == ("cuda_ipc", "rate")


def test_an_older_agent_does_not_tell_how_many_bytes(rails: Writer) -> None:
    rails.tree.carry("mlx5_0", MOVED)
    assert rails.measured(None, lane_kind="rdma", lane_source="rate") == ("rdma", "rate", [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["nics", "peers", "peer", "lane", "devices", "sent_bytes_total", "kind", "name", "protocol"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["nics", "peers", "moved_bytes", "lane"]), JSON)


@given(OBJECTS, OBJECTS, OBJECTS)
def test_broken_answers_are_unknown(before: dict[str, Any], after: dict[str, Any], probe: dict[str, Any]) -> None:
    assert measured_lane("decode-0", before, after, probe).keys() == {"lane", "lane_source", "carried", "moved_bytes"}
    assert isinstance(lane_evidence(before, after), list)


@pytest.mark.parametrize(
    ("peer", "lane", "expected"),
    [
        ({}, {}, []),
        ({"lane_kind": "rdma", "lane_source": "rate", "lane_gb_per_s": 48.0}, {}, ["rdma: rate, 48 GB/s"]),
        ({}, {"protocol": "tcp"}, ["tcp: engine"]),
        (
            {"lane_kind": "cuda_ipc", "lane_source": "rate", "lane_gb_per_s": 373.0, "lane_direct": "fabric"},
            {"devices": ["mlx5_0"], "source": "settings"},
            ["cuda_ipc: rate, 373 GB/s", "path direct by fabric: mapping"],
        ),
        (
            {"same_host": False},
            {"devices": ["rdmap52s0", "rdmap62s0"], "source": "open devices"},
            ["rdmap52s0 rdmap62s0: open devices"],
        ),
    ],
)
def test_evidence_without_a_probe(peer: dict[str, Any], lane: dict[str, Any], expected: list[str]) -> None:
    assert lane_evidence(peer, {"lane": lane}) == expected
