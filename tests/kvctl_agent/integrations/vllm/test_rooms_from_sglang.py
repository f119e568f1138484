"""Rooms of a prefill rank of SGLang, and vLLM's blocks that they fill: other pages, another order, no aux rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvctl_agent import Agent, KVPool, Rank
from kvctl_agent.contract.snapshots import Integration
from kvctl_agent.memory.pool import StateTensors
from tests.support.vllm import stand_ins as vllm
from tests.support.vllm.server import Model, Server, _name

PAGE, PAGES = 16, 32
MODEL = Model(block=32)
SGLANG = Integration(engine="sglang", engine_version="0.5.23", mode="backend", settings={})
ROOM = 1 << 62


class SGLangRank:
    """A prefill rank with SGLang's pool: K and V apart, pages of `[tokens, heads, dim]`, aux rows."""

    def __init__(self, **pool: Any) -> None:
        shape = (PAGES * PAGE, MODEL.heads, MODEL.dim)
        self.layers = [[np.zeros(shape, np.float32) for _ in MODEL.groups[0][0]] for _ in "kv"]
        aux = [np.zeros((4, 16), np.int32), np.zeros((4, 64), np.float32)]
        self.pool = KVPool.from_tensors(*self.layers, page_size=PAGE, total_kv_heads=MODEL.heads, aux=aux, **pool)
        self.agent = Agent(
            role="prefill",
            rank=Rank(),
            pool=self.pool,
            name="prefill-0",
            bootstrap="tcp://127.0.0.1:0",
            integration=SGLANG,
            staging_buffer_mb=1,
            chunk_tokens=32,
        ).start()

    def send(self, prompt: int, tokens: int, cached: int = 0) -> None:
        """Sends a prompt from scattered pages, in chunks of three, and then its aux row."""
        pages = [(7 * place + 3) % PAGES for place in range(-(-tokens // PAGE))]
        for layer in MODEL.groups[0][0]:
            kv = MODEL.truth(layer, prompt, tokens).numpy()
            for position in range(tokens):
                row = pages[position // PAGE] * PAGE + position % PAGE
                for part, tensors in enumerate(self.layers):
                    tensors[layer][row] = kv[position, :, part * MODEL.dim : (part + 1) * MODEL.dim]
        send = self.agent.send(ROOM)
        for first in range(0, len(pages), 3):
            send.pages(pages[first : first + 3], last=first + 3 >= len(pages))
        send.finish(2)

    def close(self) -> None:
        self.agent.close()
        self.pool.close()


Start = Callable[..., tuple[SGLangRank, Server]]


@pytest.fixture
def start(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    with ExitStack() as stack:

        def pair(isa: str = "", **pool: Any) -> tuple[SGLangRank, Server]:
            monkeypatch.setattr(vllm.Kernels, "isa", isa)
            prefill = SGLangRank(**pool)
            stack.callback(prefill.close)
            decode = Server("decode", MODEL, 1)
            stack.callback(decode.close)
            return prefill, decode

        yield pair


def ask(prefill: SGLangRank, decode: Server, tokens: int, cached: int = 0) -> None:
    params = {"do_remote_prefill": True, "transfer_id": ROOM, "kvctl_prefill": str(prefill.agent.bootstrap)}
    decode.add("r", tokens, params)
    decode.step()
    assert decode.receive("r", cached)


def blocks(decode: Server, layer: int) -> torch.Tensor:
    """Returns the blocks of the request in a layer, as vLLM's kernels find them."""
    return decode.tensors[0][_name(layer)][decode.jobs["r"].table[0]]


@pytest.mark.parametrize("tokens", [1, 16, 17, 32, 33, 200])
def test_rows_of_tokens(start: Start, tokens: int) -> None:
    prefill, decode = start()
    ask(prefill, decode, tokens)
    prefill.send(0, tokens)
    decode.wait(lambda: "r" in decode.received, "r is received")
    assert not decode.failed
    decode.check("r")


def test_a_prefix_that_decode_has_cached(start: Start) -> None:
    prefill, decode = start()
    ask(prefill, decode, 200, cached=96)
    prefill.send(0, 200)
    decode.wait(lambda: "r" in decode.received, "r is received")
    decode.check("r")


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("tokens", [1, 33, 64, 200])
def test_columns_of_kernels_on_a_cpu(start: Start, isa: str, tokens: int) -> None:
    prefill, decode = start(isa)
    ask(prefill, decode, tokens)
    prefill.send(0, tokens)
    decode.wait(lambda: "r" in decode.received, "r is received")
    assert not decode.failed
    for layer in MODEL.groups[0][0]:
        wanted = MODEL.truth(layer, 0, tokens)
        found = blocks(decode, layer).reshape(-1, MODEL.heads, 2, MODEL.block * MODEL.dim)
        k = found[:, :, 0].reshape(-1, MODEL.heads, MODEL.dim, MODEL.block).permute(0, 3, 1, 2).flatten(0, 1)
        v = found[:, :, 1].reshape(-1, MODEL.heads, MODEL.block, MODEL.dim).transpose(1, 2).flatten(0, 1)
        assert torch.equal(torch.cat([k, v], -1)[:tokens], wanted), f"layer {layer}"


@pytest.mark.parametrize(
    ("isa", "pool", "factor"),
    [
        ("", {"dtype": "bfloat16"}, "kv dtype bfloat16 ≠ float32"),
        ("vec", {"dtype": "float32 hnd"}, "kv dtype float32 hnd ≠ float32 cpu-vec-32, float32"),
        ("amx", {}, "kv dtype float32 ≠ float32 cpu-amx-32"),
        (
            "",
            {"state": [StateTensors("mamba_0", [np.zeros((4, 8), np.uint8)], [0])]},
            "engine sglang ≠ vllm, between which only plain KV can be transferred: state mamba_0",
        ),
    ],
)
def test_what_the_two_cannot_share_is_refused_by_name(
    start: Start, isa: str, pool: dict[str, Any], factor: str
) -> None:
    prefill, decode = start(isa, **pool)
    ask(prefill, decode, 40)
    decode.wait(lambda: "r" in decode.failed, "r has failed")
    failed = decode.agents[0].observe.failed()
    [room] = failed["rooms"]
    assert room["failure"]["code"] == "KV_COMPAT_MISMATCH"
    assert factor in room["failure"]["text"]
