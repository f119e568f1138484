"""Which GPUs a fleet uses and how much of them: planned here as if there were some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvctl.lab.ranks import resolve, sizing
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens
from kvctl.lab.ranks.resolve import make_plan
from kvctl_agent.errors import ConfigError, DeviceUnavailable, LayoutError

MIB = 1 << 20
GIB = 1 << 30


def request(**changes: Any) -> PlanRequest:
    wanted: dict[str, Any] = {
        "prefill": (Sizes(tp=4),),
        "decode": Sizes(),
        "loads": (Load(4, Tokens(values=(1024,))),),
        "memory_bytes": 1,
        "seed": 1,
        "device": "cuda",
        **changes,
    }
    return PlanRequest(**wanted)


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that there are GPUs with so many bytes free each."""

    def pretend(*free: int) -> None:
        monkeypatch.setattr(sizing, "count_gpus", lambda: len(free))
        measured = sizing.gpu_budget
        monkeypatch.setattr(resolve, "gpu_budget", partial(measured, free=lambda gpu: free[gpu]))

    return pretend


def placed(planned: Any) -> list[tuple[str, int]]:
    return [(rank["role"], rank["device"]) for rank in planned["ranks"]]


def test_one_gpu_is_everybodys(have: Callable[..., None]):
    have(140 * GIB)
    planned = make_plan(request())
    assert placed(planned) == [("prefill", 0)] * 4 + [("decode", 0)]
    assert planned["device"] == "cuda"


def test_of_several_the_first_half_prefills(have: Callable[..., None]):
    have(*[140 * GIB] * 4)
    assert placed(make_plan(request(decode=Sizes(dp=3)))) == [
        *(("prefill", gpu) for gpu in (0, 1, 0, 1)),
        *(("decode", gpu) for gpu in (2, 3, 2)),
    ]
    have(*[140 * GIB] * 3)
    planned = make_plan(request(decode=Sizes(dp=2)))
    assert placed(planned) == [("prefill", 0)] * 4 + [("decode", 1), ("decode", 2)]


def test_given_gpus_are_taken_in_turn_by_all_instances_together(have: Callable[..., None]):
    have(*[140 * GIB] * 3)
    planned = make_plan(request(prefill=(Sizes(tp=2), Sizes()), prefill_gpus=(2, 0), decode_gpus=(1,)))
    assert placed(planned) == [("prefill", 2), ("prefill", 0), ("prefill", 2), ("decode", 1)]


def test_paths_on_gpus_include_direct(have: Callable[..., None]):
    have(140 * GIB)
    assert make_plan(request())["paths"] == ["slice", "staged", "direct", "auto"]
    assert make_plan(request(decode=Sizes(tp=4)))["paths"] == ["bulk", "staged", "direct", "auto"]
    planned = make_plan(request(paths=("direct",), direct_sms=24))
    assert planned["config"]["direct_sms"] == 24
    assert {share["descriptors"]["direct"] for share in planned["shares"]} == {1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prefill_gpus": (1,)}, r"--prefill-gpus 1: this machine has no GPU 1, only GPU 0"),
        ({"decode_gpus": (0, 8, 7)}, r"--decode-gpus 0,8,7: this machine has no GPU 8,7"),
        ({"device": "cpu", "decode_gpus": (0,)}, r"--decode-gpus 0: pools are in host memory; give --device cuda"),
        ({"device": "cpu", "direct_sms": 4}, r"--direct-sms 4: pools are in host memory; give --device cuda"),
        ({"device": "cpu", "memory_bytes": GIB, "paths": ("direct",)}, r"--path direct: .* --device cuda"),
        ({"device": "cdua"}, r"--device 'cdua' is unknown; allowed: .*, did you mean cuda"),
    ],
)
def test_what_cannot_be_is_refused(have: Callable[..., None], changes: dict[str, Any], says: str):
    have(140 * GIB)
    with pytest.raises(ConfigError, match=says):
        make_plan(request(**changes))


def per_gpu(planned: Any, count: int) -> list[int]:
    """Bytes of pools and rings on each."""
    held = [0] * count
    for rank in planned["ranks"]:
        held[rank["device"]] += rank["pool_bytes"] + (planned["ring_bytes"] if rank["role"] == "decode" else 0)
    return held


@pytest.mark.parametrize(
    ("free", "changes"),
    [
        ((20 * GIB,), {}),
        ((20 * GIB, 20 * GIB), {}),
        ((6 * GIB, 40 * GIB), {}),
        ((40 * GIB, 6 * GIB), {"prefill_gpus": (0, 1)}),
        ((20 * GIB, 20 * GIB), {"decode": Sizes(dp=2), "decode_gpus": (0, 1)}),
        ((20 * GIB, 20 * GIB), {"ring_mb": 4096, "paths": ("staged",)}),
        ((20 * GIB, 10 * GIB), {"decode": Sizes(tp=2), "prefill": (Sizes(tp=2, pp=2), Sizes(tp=4))}),
    ],
)
def test_no_gpu_gets_more_than_its_part(have: Callable[..., None], free: tuple[int, ...], changes: dict[str, Any]):
    have(*free)
    planned = make_plan(request(loads=(Load(1024, Tokens(values=(1024,))),), rooms=4096, **changes))
    parts = [held / have for held, have in zip(per_gpu(planned, len(free)), free, strict=True)]
    assert 0.35 < max(parts) < 0.63  # a room and the ring are whole
    assert any("limited to" in note and "60 % of the" in note and "free on GPU" in note for note in planned["notes"])


def test_rings_may_be_larger_than_on_the_host(have: Callable[..., None]):
    have(140 * GIB, 140 * GIB)
    planned = make_plan(request(model="llama-3.1-70b", loads=(Load(512, Tokens(values=(1024,))),), rooms=512))
    assert planned["ring_bytes"] == 8 * GIB


def test_a_room_that_no_gpu_holds_is_refused(have: Callable[..., None]):
    have(GIB)
    with pytest.raises(
        LayoutError, match=r"only \d+ bytes are available \(60 % of the 1.0 GiB that are free on GPU 0\)"
    ):
        make_plan(request(loads=(Load(1, Tokens(values=(4096,))),)))


def test_without_gpus_it_is_said(monkeypatch: pytest.MonkeyPatch):
    def none() -> int:
        raise DeviceUnavailable("the NVIDIA driver shows no GPU: see nvidia-smi -L")

    monkeypatch.setattr(sizing, "count_gpus", none)
    with pytest.raises(DeviceUnavailable, match="the NVIDIA driver shows no GPU: see nvidia-smi -L"):
        make_plan(request())


def test_a_batch_on_gpus_has_more_windows_of_rooms(have: Callable[..., None]):
    have(140 * GIB, 140 * GIB)
    load = Load(8, Tokens(values=(1024,)))
    on_gpus = make_plan(request(loads=(load,), rooms=256))
    on_host = make_plan(request(loads=(load,), rooms=256, device="cpu", memory_bytes=140 * GIB))
    assert [end - first for first, end in on_gpus["loads"][0]["batches"]] == [64] * 4
    assert [end - first for first, end in on_host["loads"][0]["batches"]] == [37] * 6 + [34]


def test_a_small_gpu_has_smaller_batches(have: Callable[..., None]):
    have(8 * GIB)
    planned = make_plan(request(loads=(Load(8, Tokens(values=(1024,))),), rooms=256))
    assert all(end - first < 16 for first, end in planned["loads"][0]["batches"])
