"""Runs a transformers model divided into prefill and decode processes; kvctl_agent transfers its KV cache.

A small model with random weights, built from a fixed seed (nothing is downloaded), runs in three kinds of process: the
*undivided* one runs plain `model.generate` as the reference; the *prefill* ranks of one instance are divided by tensor,
pipeline and context parallelism; the *decode* ranks are data parallel with attention TP 1. Prompts are prefilled in
chunks, and each chunk's pages are sent while the next is computed; with `--pipelined`, forward hooks send each layer
group while the next one is computed. The first token travels in the aux row. Decode builds its cache from the received
pages only and continues greedily: every token must equal the reference. The model is a Llama, or (`--model mla`) a
DeepSeek-V2, whose cache is one latent row per token.

One simplification: each prefill rank computes the whole model and keeps only its own layers and heads. The transfer is
the same as in a real engine, and the example needs no collective library. Decode copies the received pages into a
transformers DynamicCache; an engine with paged attention reads them in place.

    python examples/pd_transformers.py --transport nixl --prompts 8
    python examples/pd_transformers.py --prefill-tp 2 --prefill-pp 2 --pipelined
    python examples/pd_transformers.py --prefill-tp 2 --prefill-cp 2 --model mla --transport mooncake
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# One thread per process: seven processes share the cores, and all must add numbers in the same order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from kvctl_agent import Agent, ForwardInfo, KVPool, LayoutError, ModelShape, Rank, local_shards

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 10, 16, 8, 16
LATENT_DIM, ROPE_DIM = 32, 8  # MLA: a token's row is the latent followed by its rotary part
VOCABULARY = 512
STAGING_BUFFER_MB, STAGING_RING_MB = 4, 16  # the defaults are sized for real models
CLOSE_S = 15.0  # an agent closes within 5 s
SEED = 20
MODULES = {"llama": "llama.modeling_llama", "mla": "deepseek_v2.modeling_deepseek_v2"}
FIRST_ROOM = 9_000_000_000_000_000_000  # rooms are 64-bit numbers; routers draw them at random


@dataclass(frozen=True)
class Options:
    """Command-line options, the same in every process."""

    transport: str
    model: str
    prefill_tp: int
    prefill_pp: int
    prefill_cp: int
    cp_mode: str
    pipelined: bool
    prompts: int
    new_tokens: int
    chunk_tokens: int
    page_size: int
    decode_dp: int
    timeout_s: float
    bootstrap: str
    name: str

    def lengths(self) -> list[int]:
        """Returns prompt lengths in tokens: below one page, at page and chunk boundaries, several chunks and a rest."""
        page, chunk = self.page_size, self.chunk_tokens
        shapes = [3 * chunk + page + 3, chunk, page - 1, 2 * chunk + 1, chunk - 1, page, 4 * chunk, chunk + page]
        return [shapes[i % len(shapes)] + i // len(shapes) for i in range(self.prompts)]

    @property
    def prefill_ranks(self) -> list[Rank]:
        """All prefill ranks, ordered by unique rank."""
        whole = Rank(pp_size=self.prefill_pp, cp_size=self.prefill_cp, tp_size=self.prefill_tp)
        places = product(range(self.prefill_pp), range(self.prefill_cp), range(self.prefill_tp))
        return [replace(whole, pp=pp, cp=cp, tp=tp) for pp, cp, tp in places]

    @property
    def shape(self) -> ModelShape:
        """Shape of the model's KV cache, whose elements are fp32."""
        if self.model == "mla":
            return ModelShape(LAYERS, 1, LATENT_DIM + ROPE_DIM, 0, 4, kind="mla")
        return ModelShape(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM, 4)

    def agent(self, role: Any, place: int, rank: Rank, pool: KVPool, **config: Any) -> Agent:
        return Agent(
            role=role,
            rank=rank,
            pool=pool,
            model=self.shape,
            name=f"{self.name}-{role}-{place}",
            bootstrap=self.bootstrap,
            transport=self.transport,
            chunk_tokens=self.chunk_tokens,
            **config,
        )


# -- the model


def build_model(name: str) -> Any:
    """Builds the model in fp32, with identical weights in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": QUERY_HEADS * HEAD_DIM,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": QUERY_HEADS,
        "max_position_embeddings": 8192,
        # Five times the default: attention is sharp, so the tokens depend on the cache, and the best logit leads the
        # second by far more than the rounding that chunking changes.
        "initializer_range": 0.1,
    }
    model: Any
    if name == "mla":
        latent = {"kv_lora_rank": LATENT_DIM, "qk_rope_head_dim": ROPE_DIM, "qk_nope_head_dim": HEAD_DIM}
        dense = {"first_k_dense_replace": LAYERS, "q_lora_rank": None, "v_head_dim": HEAD_DIM}
        model = DeepseekV2ForCausalLM(
            DeepseekV2Config(**common, **latent, **dense, num_key_value_heads=QUERY_HEADS)  # type: ignore[arg-type]
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM))
    return model.eval()


def make_prompts(options: Options) -> list[torch.Tensor]:
    """Draws the tokens of all prompts at random, the same in every process."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in options.lengths()]


@torch.inference_mode()
def generate_undivided(model: Any, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """Generates greedily with transformers alone, in one process and one prefill."""
    output = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return list(map(int, output[0, len(prompt) :]))


@torch.inference_mode()
def forward(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> int:
    """Runs the model on `tokens` and appends their KV to `cache`; returns the greedy next token."""
    logits = model(tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def continue_greedily(model: Any, cache: DynamicCache, first: int, new_tokens: int) -> list[int]:
    """Decodes greedily from a filled cache; returns `first` and the following tokens, `new_tokens` in total."""
    tokens = [first]
    while len(tokens) < new_tokens:
        tokens.append(forward(model, torch.tensor(tokens[-1:]), cache))
    return tokens


# -- one rank's paged KV memory


class PagedKV:
    """One rank's part of the KV cache in pages, and its free pages.

    A layer is a pair of tensors, `[pages * page_size, heads, dim]` each: K and V, or the latent and its rotary part.
    """

    def __init__(self, shape: ModelShape, rank: Rank, num_pages: int, page_size: int, slots: int, seed: int) -> None:
        here = local_shards(shape, page_size, rank.parallel_config, rank.coord)[0]
        rows = num_pages * page_size
        self.latent = shape.kind == "mla"
        self.heads = slice(here.head_lo, here.head_hi)
        self.layers = range(here.layer_lo, here.layer_hi)
        self.page_size = page_size
        dims = [LATENT_DIM + ROPE_DIM] if self.latent else [HEAD_DIM, HEAD_DIM]
        self.tensors = [[torch.zeros(rows, here.heads, dim) for dim in dims] for _ in self.layers]
        self.first_tokens = torch.zeros(slots, dtype=torch.int64)
        # Shuffled, so that no two ranks use the same page numbers and few pages are neighbours.
        self.free = random.Random(seed).sample(range(num_pages), num_pages)

    def pool(self) -> KVPool:
        """Returns the pool for the agent; the aux row of a slot contains the first generated token, 8 bytes."""
        aux = self.first_tokens.view(torch.uint8).view(-1, 8)
        planes = [list(plane) for plane in zip(*self.tensors, strict=True)]
        if self.latent:
            return KVPool.from_tensors(planes[0], None, page_size=self.page_size, aux=aux)
        k, v = planes
        return KVPool.from_tensors(k, v, page_size=self.page_size, total_kv_heads=KV_HEADS, aux=aux)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.pages_for(tokens))]

    def release(self, pages: Sequence[int]) -> None:
        self.free.extend(pages)

    def store(self, cache: DynamicCache, layer: int, pages: Sequence[int], start: int, stop: int) -> None:
        """Copies tokens [start, stop) of one layer and this rank's heads from the model's cache into pages."""
        rows = self._rows(pages)[start:stop]
        entry: Any = cache.layers[layer]
        for target, source in zip(self._pair(layer), (entry.keys, entry.values), strict=True):
            target[rows] = source[0, self.heads, start:stop].transpose(0, 1)

    def load(self, pages: Sequence[int], tokens: int) -> DynamicCache:
        """Returns a transformers cache of the first `tokens` tokens in `pages`; the rank must hold the whole model."""
        rows = self._rows(pages)[:tokens]
        cache = DynamicCache()
        for layer in self.layers:
            first, second = (tensor[rows].transpose(0, 1)[None] for tensor in self._pair(layer))
            cache.update(first, second, layer)
        return cache

    def _pair(self, layer: int) -> Sequence[torch.Tensor]:
        """Returns the two tensors of a layer in the shape that transformers uses."""
        mine = self.tensors[layer - self.layers.start]
        return torch.split(mine[0], [LATENT_DIM, ROPE_DIM], dim=-1) if self.latent else mine

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """Returns the rows of the pool for the tokens of the pages, in the order of the prompt."""
        return (torch.tensor(pages)[:, None] * self.page_size + torch.arange(self.page_size)).flatten()


class Prefill:
    """Forwards of one prefill rank: a hook of each layer copies the chunk's KV into the pool, then calls `on_layer`."""

    def __init__(self, model: Any, kv: PagedKV, on_layer: Callable[[int], None]) -> None:
        self._model = model
        self._kv = kv
        self._on_layer = on_layer
        self._cache = DynamicCache()
        self._pages: Sequence[int] = ()
        self._span = (0, 0)
        for layer in kv.layers:
            model.model.layers[layer].register_forward_hook(partial(self._hook, layer))

    def run(self, prompt: torch.Tensor, pages: Sequence[int], start: int, stop: int) -> int:
        """Runs the model on tokens [start, stop) of a prompt; returns the greedy next token."""
        if start == 0:
            self._cache = DynamicCache()
        self._pages, self._span = pages, (start, stop)
        return forward(self._model, prompt[start:stop], self._cache)

    def _hook(self, layer: int, *_: Any) -> None:
        self._kv.store(self._cache, layer, self._pages, *self._span)
        self._on_layer(layer)


# -- the workers


def prefill_rank(
    place: int, options: Options, report: Callable[[str, Any], None], until_told: Callable[[], None]
) -> None:
    """Runs one rank of the prefill instance: prefills every prompt and sends this rank's pages.

    Args:
        place: index of the rank in `options.prefill_ranks`.
        report: sends a kind of result and its value to the parent.
        until_told: waits until the parent lets this rank end.
    """
    model, prompts = build_model(options.model), make_prompts(options)
    rank = options.prefill_ranks[place]
    # Room for the two longest prompts only: later prompts reuse the pages of earlier ones, once those are sent.
    num_pages = 2 * -(-max(options.lengths()) // options.page_size)
    kv = PagedKV(options.shape, rank, num_pages, options.page_size, slots=len(prompts), seed=place)
    agent = options.agent(
        "prefill",
        place,
        rank,
        kv.pool(),
        staging_buffer_mb=STAGING_BUFFER_MB,
        cp_mode=options.cp_mode,
        pipeline="on" if options.pipelined else "off",
        pipeline_min_tokens=options.chunk_tokens,  # shorter prompts take the plain path
    )
    with agent:
        agent.start()
        agent.wait_ready(options.timeout_s)
        in_flight: deque[tuple[Any, list[int]]] = deque()
        ready: list[Callable[[int], None]] = []
        prefill = Prefill(model, kv, lambda layer: ready[-1](layer))
        for slot, prompt in enumerate(prompts):
            while len(kv.free) < kv.pages_for(len(prompt)):
                send, pages = in_flight.popleft()
                succeed(send, options.timeout_s)
                kv.release(pages)
            pages = kv.allocate(len(prompt))
            groups = agent.layer_groups(ForwardInfo((len(prompt),))).groups
            send = agent.send(room=FIRST_ROOM + slot)
            send.prefetch(groups)
            for start in range(0, len(prompt), options.chunk_tokens):
                stop = min(start + options.chunk_tokens, len(prompt))
                chunk, last = pages[start // kv.page_size : kv.pages_for(stop)], stop == len(prompt)
                by_last_layer = {group[-1]: group for group in groups}
                ready[:] = [partial(_send_group, send, by_last_layer, chunk, last)]
                kv.first_tokens[slot] = prefill.run(prompt, pages, start, stop)  # the value of the last chunk remains
                if not groups:
                    send.pages(chunk, last=last)
            send.finish(aux_index=slot)
            in_flight.append((send, pages))
        for send, _ in in_flight:
            succeed(send, options.timeout_s)
        pipelined = agent.telemetry.metrics.total("kvctl_pipeline_decisions_total", "formula")
        report("pipelined", int(pipelined))
        until_told()


def _send_group(send: Any, by_last_layer: dict[int, range], pages: Sequence[int], last: bool, layer: int) -> None:
    """Sends the pages of a layer group if `layer` is its last layer."""
    if (group := by_last_layer.get(layer)) is not None:
        send.layers(group, pages, last=last)


def decode_rank(dp: int, options: Options, report: Callable[[str, Any], None], until_told: Callable[[], None]) -> None:
    """Runs one data-parallel rank: receives the KV cache of each of its prompts, and generates.

    Args:
        dp: data-parallel rank.
        report: sends a kind of result and its value to the parent.
        until_told: waits until the parent lets this rank end.
    """
    model, lengths = build_model(options.model), options.lengths()
    mine = range(dp, len(lengths), options.decode_dp)
    num_pages = max(1, sum(-(-lengths[i] // options.page_size) for i in mine))
    rank = Rank(dp=dp, dp_size=options.decode_dp)
    kv = PagedKV(options.shape, rank, num_pages, options.page_size, slots=len(lengths), seed=100 + dp)
    agent = options.agent("decode", dp, rank, kv.pool(), staging_ring_mb=STAGING_RING_MB)
    with agent:
        agent.start()
        agent.wait_ready(options.timeout_s)
        receives = []
        for prompt in mine:
            pages = kv.allocate(lengths[prompt])
            receives.append((prompt, pages, agent.receive(room=FIRST_ROOM + prompt, pages=pages, aux_index=prompt)))
        for prompt, pages, receive in receives:
            succeed(receive, options.timeout_s)
            cache = kv.load(pages, lengths[prompt])
            tokens = continue_greedily(model, cache, int(kv.first_tokens[prompt]), options.new_tokens)
            kv.release(pages)
            report("tokens", (prompt, dp, tokens))
        until_told()


def succeed(transfer: Any, timeout_s: float) -> None:
    """Waits until a Send or Receive has succeeded; raises RuntimeError if it has not within the time limit."""
    state = transfer.wait(timeout_s)
    if state.name != "SUCCESS":
        raise RuntimeError(f"room {transfer.room} ended as {state.name}: {transfer.error}")


# -- processes


def worker(role: Callable[..., None], rank: int, options: Options, parent: Connection) -> None:
    """Main function of every rank's process: runs `role`, reports errors to the parent, and ends if the parent ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # SystemExit leaves the agent's `with`, which cleans up
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()

    def until_told() -> None:
        """Reports that this rank is done, and waits until the parent reports that all are: peers may still need it."""
        parent.send(("through", None))
        if not parent.poll(options.timeout_s):
            raise TimeoutError(f"no word from the parent within {options.timeout_s} s")

    try:
        role(rank, options, lambda kind, value: parent.send((kind, value)), until_told)
    except Exception:
        parent.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(CLOSE_S)
    os._exit(1)


class Ranks:
    """Processes of all ranks; leaving the `with` block ends them."""

    def __init__(self, options: Options) -> None:
        # One server process imports torch and transformers, and every rank is forked from it before it has threads:
        # one slow import instead of one for each rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", f"transformers.models.{MODULES[options.model]}"])
        # Ctrl-C reaches the whole process group; only this process handles it, and ends the others.
        answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, answer)
        self._options = options
        self._ranks: dict[str, tuple[BaseProcess, Connection]] = {}
        for role, body, size in (
            ("prefill", prefill_rank, len(options.prefill_ranks)),
            ("decode", decode_rank, options.decode_dp),
        ):
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker, args=(body, rank, options, theirs), name=f"{role} {rank}", daemon=True
                )
                process.start()
                theirs.close()
                self._ranks[process.name] = (process, ours)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _pipe in self._ranks.values():
            process.terminate()
        for process, pipe in self._ranks.values():
            process.join(CLOSE_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()

    def gather(self) -> tuple[dict[int, tuple[int, list[int]]], int]:
        """Waits until all ranks have succeeded, and ends them.

        Returns:
            The decode rank and tokens of every prompt, by prompt; and the number of pipelined forwards.

        Raises:
            RuntimeError: a rank failed, died or exceeded the time limit; the message contains its error.
        """
        found: dict[int, tuple[int, list[int]]] = {}
        pipelined = 0
        names = {pipe: name for name, (_, pipe) in self._ranks.items()}
        pending = set(names)
        deadline = time.monotonic() + self._options.timeout_s
        while pending:
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(sorted(names[pipe] for pipe in pending))
                raise RuntimeError(f"not through within {self._options.timeout_s} s: {late}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    process = self._ranks[names[pipe]][0]
                    process.join(CLOSE_S)
                    raise RuntimeError(f"{names[pipe]} died with exit code {process.exitcode}") from None
                if kind == "failed":
                    raise RuntimeError(f"{names[pipe]} failed:\n{value}")
                if kind == "through":
                    pending.discard(pipe)
                elif kind == "pipelined":
                    pipelined += value
                else:
                    prompt, rank, tokens = value
                    found[prompt] = (rank, tokens)
        for pipe in names:
            pipe.send("stop")
        for name, (process, _) in self._ranks.items():
            process.join(CLOSE_S)
            if process.exitcode != 0:
                raise RuntimeError(f"{name} did not end well after its work: exit code {process.exitcode}")
        return found, pipelined


def parse(arguments: Sequence[str] | None, directory: str) -> Options:
    parser = argparse.ArgumentParser(
        description="Divided prefill to decode DP with a transformers model, token for token."
    )
    parser.add_argument("--transport", choices=("nixl", "mooncake", "loopback"), default="nixl")
    parser.add_argument(
        "--model", choices=tuple(MODULES), default="llama", help="llama (GQA) or mla (latent attention)"
    )
    parser.add_argument("--prefill-tp", type=int, default=4, help="attention tensor parallel ranks (default 4)")
    parser.add_argument("--prefill-pp", type=int, default=1, help="pipeline stages (default 1)")
    parser.add_argument("--prefill-cp", type=int, default=1, help="context parallel ranks (default 1)")
    parser.add_argument("--cp-mode", choices=("rank0", "all", "all-chunk", "room-hash"), default="all")
    parser.add_argument("--pipelined", action="store_true", help="send layer groups from the model's forward hooks")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--chunk-tokens", type=int, default=64, help="tokens per prefill chunk (default 64)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default 16)")
    parser.add_argument("--decode-dp", type=int, default=2, help="decode ranks (default 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that any wait may take (default 120)")
    args = parser.parse_args(arguments)
    sizes = (args.prompts, args.new_tokens, args.chunk_tokens, args.page_size, args.decode_dp)
    if min(*sizes, args.prefill_tp, args.prefill_pp, args.prefill_cp) < 1 or args.page_size < 2:
        parser.error("every size must be at least 1, and --page-size at least 2")
    if args.chunk_tokens % args.page_size:
        parser.error(f"--chunk-tokens {args.chunk_tokens} is not a multiple of --page-size {args.page_size}")
    options = Options(
        transport=args.transport,
        model=args.model,
        prefill_tp=args.prefill_tp,
        prefill_pp=args.prefill_pp,
        prefill_cp=args.prefill_cp,
        cp_mode=args.cp_mode,
        pipelined=args.pipelined,
        prompts=args.prompts,
        new_tokens=args.new_tokens,
        chunk_tokens=args.chunk_tokens,
        page_size=args.page_size,
        decode_dp=args.decode_dp,
        timeout_s=args.timeout,
        bootstrap=f"ipc://{directory}/bootstrap",
        name=f"pd-{os.getpid()}",
    )
    try:
        for rank in options.prefill_ranks:
            local_shards(options.shape, options.page_size, rank.parallel_config, rank.coord)
    except LayoutError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="pd-") as directory:
        options = parse(arguments, directory)
        try:
            with Ranks(options) as ranks:
                generated, pipelined = ranks.gather()
            model = build_model(options.model)
            expected = [generate_undivided(model, prompt, options.new_tokens) for prompt in make_prompts(options)]
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    print("prompt  tokens  chunks  pages  KV KiB  decode  generated  result")
    different = 0
    for prompt, length in enumerate(options.lengths()):
        rank, tokens = generated[prompt]
        same = tokens == expected[prompt]
        different += not same
        where = next((i for i, pair in enumerate(zip(tokens, expected[prompt], strict=True)) if pair[0] != pair[1]), 0)
        result = "identical" if same else f"differs from token {where}: {tokens[where]}, not {expected[prompt][where]}"
        kib = length * options.shape.token_bytes / 1024
        chunks, pages = -(-length // options.chunk_tokens), -(-length // options.page_size)
        print(f"{prompt:6}  {length:6}  {chunks:6}  {pages:5}  {kib:6.0f}  dp {rank:3}  {len(tokens):9}  {result}")
    if different:
        print(f"{different} of {options.prompts} prompts differ")
        return 1
    if options.pipelined:
        print(f"{pipelined} forwards of {len(options.prefill_ranks)} prefill ranks were sent by layer groups")
    print(f"all {options.prompts} prompts token-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
