"""Real compute, on a processor: what it does to which sizes, and how it is handed over. Nothing is measured here."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvctl.lab.models import MODELS
from kvctl.lab.ranks import gpu_engine
from kvctl.lab.ranks.compute import Computed
from kvctl.lab.ranks.geometry import resolve_shape
from kvctl.lab.ranks.gpu_engine import GpuEngine, LayerWork, layer_work
from kvctl.lab.ranks.request import PlanRequest, Sizes
from kvctl_agent.layout.parallel import ParallelConfig

pytest.importorskip("torch")

TINY = LayerWork(((16, 48), (32, 16)), 4, 2, 8)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for good figures here."""
    monkeypatch.setattr(gpu_engine, "_MIN_MEASURED_S", 0.0)


def work(model: str, tp: int) -> LayerWork:
    request = PlanRequest((Sizes(),), Sizes(), (), 0, 0, model=model, compute="gpu")
    return layer_work(resolve_shape(request), ParallelConfig(tp=tp))


@pytest.mark.parametrize(
    ("model", "tp", "products", "heads"),
    [
        ("llama-3.1-70b", 4, ((8192, 2560), (2048, 8192), (8192, 14336), (7168, 8192)), (16, 2, 128)),
        ("qwen2.5-72b", 8, ((8192, 1280), (1024, 8192), (8192, 7392), (3696, 8192)), (8, 1, 128)),
        # Two ranks hold each of the four heads.
        ("qwen3-235b-a22b", 8, ((4096, 1280), (1024, 4096), (4096, 3072), (1536, 4096)), (8, 1, 128)),
        (
            "deepseek-r1",
            16,
            ((7168, 2112), (1536, 1536), (512, 2048), (1024, 7168), (7168, 2304), (1152, 7168)),
            (8, 8, 192),
        ),
    ],
)
def test_a_rank_computes_its_share_of_the_model(model: str, tp: int, products: Any, heads: tuple[int, int, int]):
    found = work(model, tp)
    assert found.products == products
    assert found[1:] == heads


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama-3.1-8b", 8.0), ("llama-3.1-70b", 70.6), ("qwen2.5-72b", 72.7), ("qwen3-32b", 32.8), ("mistral-7b", 7.2)],
)
def test_all_layers_together_are_the_model(model: str, billions: float):
    """What is missing are embeddings."""
    weights = sum(width * out for width, out in work(model, 1).products) * MODELS[model].num_layers / 1e9
    assert 0.85 * billions < weights < 1.01 * billions


@pytest.mark.parametrize("model", MODELS)
def test_every_model_divides(model: str):
    for tp in (1, 2, 4, 8):
        found = work(model, tp)
        assert found.q_heads % found.kv_heads == 0
        assert all(size > 0 for product in found.products for size in product)


def engine(**changes: Any) -> GpuEngine:
    return GpuEngine(**{"work": TINY, "device": "cpu", "layers": 3, "chunk_tokens": 8, **changes})


def test_a_room_s_forward_is_computed_chunk_by_chunk():
    computes = engine()
    computes.prepare([20, 5])
    job = computes.begin(time.monotonic_ns(), 3)
    since = time.monotonic_ns()
    for chunk, tokens in enumerate((8, 8, 4)):
        assert job.compute(chunk, tokens, 0, 2) is None  # computed on return: there is nothing to wait for
        job.compute(chunk, tokens, 2, 3)
    how = job.computed()
    assert isinstance(how, Computed)
    assert how.compute_ns == how.done_ns - how.started_ns > 0
    assert since <= how.done_ns <= time.monotonic_ns()


def test_every_chunk_sees_those_before_it(monkeypatch: pytest.MonkeyPatch):
    computes = engine()
    computes.prepare([24])
    seen = []
    monkeypatch.setattr(computes, "_layer", type("Layer", (), {"compute": lambda self, *args: seen.append(args)})())
    job = computes.begin(0, 3)
    for chunk, tokens in enumerate((8, 8, 4)):
        for layer in range(3):
            job.compute(chunk, tokens, layer, layer + 1)
    assert seen == [(8, 0)] * 3 + [(8, 8)] * 3 + [(4, 16)] * 3


def test_ranks_of_a_context_parallel_instance_share_the_tokens(monkeypatch: pytest.MonkeyPatch):
    computes = engine(share=2)
    seen = []
    monkeypatch.setattr(computes, "_layer", type("Layer", (), {"compute": lambda self, *args: seen.append(args)})())
    computes.put(5, 8, 1)
    assert seen == [(3, 8)]


def test_what_a_prompt_takes_alone_is_measured_or_lies_between():
    computes = engine()
    computes.prepare(range(1, 30))
    assert len(computes._alone) <= 9
    assert {1, 29} <= computes._alone.keys()
    computes._alone = {10: 100, 20: 300, 40: 900}
    assert [computes.alone_ns(tokens) for tokens in (5, 10, 15, 20, 30, 40, 99)] == [100, 100, 200, 300, 600, 900, 900]


def test_it_takes_no_more_rooms_than_it_can_begin_soon(monkeypatch: pytest.MonkeyPatch):
    computes = engine()
    passed: set[int] = set()
    monkeypatch.setattr(computes.timeline, "passed", lambda mark: mark in passed)
    for mark in (1, 2):
        assert computes.ready
        computes.submitted(mark)
    assert not computes.ready
    passed.add(1)
    assert computes.ready
