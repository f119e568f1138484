"""A transformers model divided into prefill and decode processes, its KV cache handed over by kvctl_agent.

A small Llama with random weights, made in place from a fixed seed (nothing is downloaded), runs in three kinds of
process: one *undivided*, plain `model.generate`, which says what is right; four *prefill* ranks of one tensor-parallel
instance; and *decode* ranks that are data parallel with attention TP 1. A prompt is prefilled chunk by chunk; each
chunk's pages go out while the next is computed; the first token travels in the aux row. Decode builds its cache from
the pages that arrived, and from nothing else, and continues greedily. Every token must equal the undivided run's.

What is not real: each prefill rank computes the whole model instead of a quarter of it, then keeps only its own two
KV heads. The handover sees what it would see in a real engine, four processes with two heads each and page numbers
of their own, while the example needs no collective library. Decode copies the arrived pages into a transformers
DynamicCache and appends to that; an engine with paged attention would read them where they are.

    python examples/pd_transformers.py --transport nixl --prompts 8
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
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# One thread for each process: seven processes share the cores, and sums are added in one order everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvctl_agent import Agent, KVPool, Rank

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 16, 8, 32
VOCABULARY = 512
PREFILL_TP = 4
STAGING_BUFFER_MB, STAGING_RING_MB = 4, 16  # the defaults are made for real models
CLOSE_S = 15.0  # an agent closes within 5 s
SEED = 20
FIRST_ROOM = 9_000_000_000_000_000_000  # rooms are 64-bit numbers; routers draw them at random


@dataclass(frozen=True)
class Options:
    """What the command line says, the same in every process."""

    transport: str
    prompts: int
    new_tokens: int
    chunk_tokens: int
    page_size: int
    decode_dp: int
    timeout_s: float
    bootstrap: str
    name: str

    def lengths(self) -> list[int]:
        """Prompt lengths in tokens: below one page, page and chunk boundaries, and several chunks with a rest."""
        page, chunk = self.page_size, self.chunk_tokens
        shapes = [3 * chunk + page + 3, chunk, page - 1, 2 * chunk + 1, chunk - 1, page, 4 * chunk, chunk + page]
        return [shapes[i % len(shapes)] + i // len(shapes) for i in range(self.prompts)]


# -- the model


def build_model() -> Any:
    """The Llama that every process builds alike: fp32, GQA with 16 query and 8 KV heads."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=QUERY_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        # Five times the default: attention is sharp, so the tokens depend on the cache, and the best logit leads the
        # second by far more than the rounding that chunking changes.
        initializer_range=0.1,
    )
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def make_prompts(options: Options) -> list[torch.Tensor]:
    """Random token ids, `[tokens]` each."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in options.lengths()]


@torch.inference_mode()
def generate_undivided(model: Any, prompt: torch.Tensor, new_tokens: int) -> list[int]:
    """What transformers itself generates greedily, in one process and one prefill."""
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
    """Run `tokens` on top of `cache`, which grows by them; returns the greedy next token."""
    logits = model(tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return int(logits[0, -1].argmax())


def continue_greedily(model: Any, cache: DynamicCache, first: int, new_tokens: int) -> list[int]:
    """Decode from a filled cache: `first` and the tokens after it, `new_tokens` in all."""
    tokens = [first]
    while len(tokens) < new_tokens:
        tokens.append(forward(model, torch.tensor(tokens[-1:]), cache))
    return tokens


# -- one rank's paged KV memory


class PagedKV:
    """A rank's pool, K and V `[pages * page_size, heads, head_dim]` per layer, and which of its pages are free."""

    def __init__(self, heads: range, num_pages: int, page_size: int, slots: int, seed: int) -> None:
        shape = (num_pages * page_size, len(heads), HEAD_DIM)
        self.heads = heads
        self.page_size = page_size
        self.k = [torch.zeros(shape) for _ in range(LAYERS)]
        self.v = [torch.zeros(shape) for _ in range(LAYERS)]
        self.first_tokens = torch.zeros(slots, dtype=torch.int64)
        # Shuffled, so that no two ranks use the same page numbers and few pages are neighbours.
        self.free = random.Random(seed).sample(range(num_pages), num_pages)

    def pool(self) -> KVPool:
        """The pool as the agent takes it; the aux row of a slot is its first token, 8 bytes."""
        aux = self.first_tokens.view(torch.uint8).view(-1, 8)
        return KVPool.from_tensors(k=self.k, v=self.v, page_size=self.page_size, total_kv_heads=KV_HEADS, aux=aux)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.pages_for(tokens))]

    def release(self, pages: Sequence[int]) -> None:
        self.free.extend(pages)

    def store(self, cache: DynamicCache, pages: Sequence[int], start: int, stop: int) -> None:
        """Copy tokens [start, stop) of this rank's heads from the cache of the whole model into pages."""
        rows = self._rows(pages)[start:stop]
        heads = slice(self.heads.start, self.heads.stop)
        layers: list[Any] = cache.layers
        for layer, entry in enumerate(layers):
            self.k[layer][rows] = entry.keys[0, heads, start:stop].transpose(0, 1)
            self.v[layer][rows] = entry.values[0, heads, start:stop].transpose(0, 1)

    def load(self, pages: Sequence[int], tokens: int) -> DynamicCache:
        """A transformers cache of the first `tokens` tokens in `pages`; this rank must hold all heads."""
        rows = self._rows(pages)[:tokens]
        cache = DynamicCache()
        for layer in range(LAYERS):
            cache.update(self.k[layer][rows].transpose(0, 1)[None], self.v[layer][rows].transpose(0, 1)[None], layer)
        return cache

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """Pool rows of the pages' tokens, in the prompt's order."""
        return (torch.tensor(pages)[:, None] * self.page_size + torch.arange(self.page_size)).flatten()


def prefill_in_chunks(model: Any, kv: PagedKV, prompt: torch.Tensor, pages: Sequence[int], chunk_tokens: int) -> Any:
    """Prefill chunk by chunk; yields each chunk's pages and the next token as soon as they are in the pool."""
    cache = DynamicCache()
    for start in range(0, len(prompt), chunk_tokens):
        stop = min(start + chunk_tokens, len(prompt))
        token = forward(model, prompt[start:stop], cache)
        kv.store(cache, pages, start, stop)
        yield pages[start // kv.page_size : kv.pages_for(stop)], token


# -- the workers


def prefill_rank(tp: int, options: Options, report: Callable[[str, Any], None], until_told: Callable[[], None]) -> None:
    """One of four TP ranks: prefills every prompt and sends its heads' pages."""
    model, prompts = build_model(), make_prompts(options)
    heads_per_rank = KV_HEADS // PREFILL_TP
    heads = range(tp * heads_per_rank, (tp + 1) * heads_per_rank)
    # Room for the two longest prompts only: later prompts reuse the pages of earlier ones, once those are sent.
    num_pages = 2 * -(-max(options.lengths()) // options.page_size)
    kv = PagedKV(heads, num_pages, options.page_size, slots=len(prompts), seed=tp)
    agent = Agent(
        role="prefill",
        rank=Rank(tp=tp, tp_size=PREFILL_TP),
        pool=kv.pool(),
        name=f"{options.name}-prefill-{tp}",
        bootstrap=options.bootstrap,
        transport=options.transport,
        chunk_tokens=options.chunk_tokens,
        staging_buffer_mb=STAGING_BUFFER_MB,
    )
    with agent:
        agent.start()
        agent.wait_ready(options.timeout_s)
        in_flight: deque[tuple[Any, list[int]]] = deque()
        for slot, prompt in enumerate(prompts):
            while len(kv.free) < kv.pages_for(len(prompt)):
                send, pages = in_flight.popleft()
                succeed(send, options.timeout_s)
                kv.release(pages)
            pages = kv.allocate(len(prompt))
            send = agent.send(room=FIRST_ROOM + slot)
            send.prefetch()
            sent = 0
            for chunk_pages, token in prefill_in_chunks(model, kv, prompt, pages, options.chunk_tokens):
                sent += len(chunk_pages)
                send.pages(chunk_pages, last=sent == len(pages))
                kv.first_tokens[slot] = token  # the last chunk's stays
            send.finish(aux_index=slot)
            in_flight.append((send, pages))
        for send, _ in in_flight:
            succeed(send, options.timeout_s)
        until_told()


def decode_rank(dp: int, options: Options, report: Callable[[str, Any], None], until_told: Callable[[], None]) -> None:
    """One data-parallel rank: receives its share of the prompts, all heads of each, and generates."""
    model, lengths = build_model(), options.lengths()
    mine = range(dp, len(lengths), options.decode_dp)
    num_pages = sum(-(-lengths[i] // options.page_size) for i in mine)
    kv = PagedKV(range(KV_HEADS), max(1, num_pages), options.page_size, slots=len(lengths), seed=100 + dp)
    agent = Agent(
        role="decode",
        rank=Rank(dp=dp, dp_size=options.decode_dp),
        pool=kv.pool(),
        name=f"{options.name}-decode-{dp}",
        bootstrap=options.bootstrap,
        transport=options.transport,
        chunk_tokens=options.chunk_tokens,
        staging_ring_mb=STAGING_RING_MB,
    )
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
    """Wait for a Send or Receive to end well."""
    state = transfer.wait(timeout_s)
    if state.name != "SUCCESS":
        raise RuntimeError(f"room {transfer.room} ended as {state.name}: {transfer.error}")


# -- processes


def worker(role: Callable[..., None], rank: int, options: Options, parent: Connection) -> None:
    """The body of every rank's process: errors go to the parent, and the process never outlives it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the agent's `with`, so that it cleans up
    threading.Thread(target=_die_with_parent, name="die-with-parent", daemon=True).start()

    def until_told() -> None:
        """Peers may still need this rank; the parent knows when all are through."""
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
    """All rank processes; leaving the `with` ends every one of them."""

    def __init__(self, options: Options) -> None:
        # One server process imports torch and transformers, and every rank is forked from it before it has threads:
        # one slow import instead of one for each rank.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])
        # Ctrl-C reaches the whole process group; only this process answers, and ends the others.
        answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, answer)
        self._options = options
        self._ranks: dict[str, tuple[BaseProcess, Connection]] = {}
        for role, body, size in (("prefill", prefill_rank, PREFILL_TP), ("decode", decode_rank, options.decode_dp)):
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

    def gather(self) -> dict[int, tuple[int, list[int]]]:
        """(decode rank, tokens) of every prompt, once all ranks are through and have ended well.

        Raises:
            RuntimeError: a rank failed, died or was not through in time; carries its last words.
        """
        found: dict[int, tuple[int, list[int]]] = {}
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
                else:
                    prompt, rank, tokens = value
                    found[prompt] = (rank, tokens)
        for pipe in names:
            pipe.send("stop")
        for name, (process, _) in self._ranks.items():
            process.join(CLOSE_S)
            if process.exitcode != 0:
                raise RuntimeError(f"{name} did not end well after its work: exit code {process.exitcode}")
        return found


def parse(arguments: Sequence[str] | None, directory: str) -> Options:
    parser = argparse.ArgumentParser(
        description="Prefill TP 4 to decode DP with a transformers model, token for token."
    )
    parser.add_argument("--transport", choices=("nixl", "loopback"), default="nixl")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--chunk-tokens", type=int, default=64, help="tokens per prefill chunk (default 64)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default 16)")
    parser.add_argument("--decode-dp", type=int, default=2, help="decode ranks (default 2)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that any wait may take (default 120)")
    args = parser.parse_args(arguments)
    if min(args.prompts, args.new_tokens, args.chunk_tokens, args.page_size, args.decode_dp) < 1 or args.page_size < 2:
        parser.error("every size must be at least 1, and --page-size at least 2")
    if args.chunk_tokens % args.page_size:
        parser.error(f"--chunk-tokens {args.chunk_tokens} is not a multiple of --page-size {args.page_size}")
    return Options(
        transport=args.transport,
        prompts=args.prompts,
        new_tokens=args.new_tokens,
        chunk_tokens=args.chunk_tokens,
        page_size=args.page_size,
        decode_dp=args.decode_dp,
        timeout_s=args.timeout,
        bootstrap=f"ipc://{directory}/bootstrap",
        name=f"pd-{os.getpid()}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    with tempfile.TemporaryDirectory(prefix="pd-") as directory:
        options = parse(arguments, directory)
        try:
            with Ranks(options) as ranks:
                generated = ranks.gather()
            model = build_model()
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
        kib = length * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 / 1024
        chunks, pages = -(-length // options.chunk_tokens), -(-length // options.page_size)
        print(f"{prompt:6}  {length:6}  {chunks:6}  {pages:5}  {kib:6.0f}  dp {rank:3}  {len(tokens):9}  {result}")
    if different:
        print(f"{different} of {options.prompts} prompts differ")
        return 1
    print(f"all {options.prompts} prompts token-identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
