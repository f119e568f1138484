"""Where a preflight puts the ranks of a layout, and the command that starts one."""

from __future__ import annotations

import pytest

from kvctl.lab.preflight.run import Options, place_ranks
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import plan
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens


def layout(prefill: int, decode: int) -> Plan:
    load = Load(1, Tokens((1024,)), 1)
    sizes = {"prefill": (Sizes(tp=prefill),), "decode": Sizes(dp=decode)}
    return plan(PlanRequest(**sizes, loads=(load,), memory_bytes=1 << 40, seed=1, transport="loopback"))


def hosts(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def options(ssh: tuple[str, ...]) -> Options:
    return Options("nixl", {}, {}, (), ssh, ("/venv/bin/python",), 5.0)


def test_hosts_are_divided_in_proportion_to_the_ranks_of_each_role() -> None:
    placed = place_ranks(hosts(4), layout(8, 8), gpus=True)
    assert [(rank.host, rank.device) for rank in placed if rank.role == "prefill"] == [
        *((f"n{host}", device) for host in (0, 1) for device in range(4))
    ]
    assert {rank.host for rank in placed if rank.role == "decode"} == {"n2", "n3"}
    assert [rank.name for rank in placed if rank.leads] == ["prefill-0", "prefill-4", "decode-0", "decode-4"]


def test_each_role_has_a_host_however_few_its_ranks_are() -> None:
    placed = place_ranks(hosts(3), layout(8, 1), gpus=False)
    assert {rank.host: rank.role for rank in placed} == {"n0": "prefill", "n1": "prefill", "n2": "decode"}
    assert {rank.device for rank in placed} == {-1}


def test_a_single_host_has_all_ranks_with_a_gpu_each() -> None:
    placed = place_ranks(hosts(1), layout(2, 2), gpus=True)
    assert [(rank.name, rank.device) for rank in placed] == [
        ("prefill-0", 0),
        ("prefill-1", 1),
        ("decode-0", 2),
        ("decode-1", 3),
    ]


def test_more_hosts_than_ranks_are_refused_with_a_layout_that_fits() -> None:
    with pytest.raises(ValueError, match="give the layout, for example --prefill-tp 2 --decode-dp 2"):
        place_ranks(hosts(4), layout(1, 1), gpus=False)


def test_the_host_is_appended_to_the_command_or_replaces_its_place() -> None:
    module = ["-m", "kvctl.lab.preflight"]
    assert options(("ssh", "-T")).program("gpu1") == ["ssh", "-T", "gpu1", "/venv/bin/python", *module]
    assert options(("kubectl", "exec", "-i", "{host}", "--")).program("pod-1") == [
        *("kubectl", "exec", "-i", "pod-1", "--", "/venv/bin/python"),
        *module,
    ]
