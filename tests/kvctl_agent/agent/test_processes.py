"""What agents in processes of their own cost while nothing moves; tests/recovery kills, stops and restarts them."""

from __future__ import annotations

from typing import Any


def test_idle_agents_with_connected_peers_cost_next_to_nothing(make_cluster: Any, at_best: Any) -> None:
    cluster = make_cluster("nixl").start()
    for rank in cluster.ranks.values():
        at_best(lambda rank=rank: rank.ask("cpu", seconds=0.5), 0.03)
