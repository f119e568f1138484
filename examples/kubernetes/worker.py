"""A rank of a synthetic engine in a pod: transfers KV of random prompts from prefill to decode, and verifies each byte.

A decode rank makes the requests itself: it opens a room, asks every prefill rank over HTTP to compute the prompt, and
compares what arrives with what the room's number determines. A prefill instance has one pod per TP rank; each decode
pod is an instance of its own. An engine does the same with its own scheduler, pool and router.

Environment: ROLE (prefill or decode), NAME, REGISTRY (endpoint at which TP rank 0 of prefill serves the registry),
POD_IP (prefill: the address of the pod), TP_RANK and TP_SIZE, PREFILL_URLS (decode; separated by commas),
REQUESTS_PER_SECOND (decode), and the KVCTL_… settings of the agent.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import numpy as np

from kvctl_agent import Agent, KVPool, Rank

LAYERS, HEADS, DIM, PAGE, PAGES = 8, 8, 64, 16, 1024
PROMPT_PAGES = 32
ROOM_S = 30.0


def prompt(room: int, layer: int, kv: int) -> np.ndarray:
    """Returns the KV of a room's prompt, [tokens, heads of the model, dim]."""
    random = np.random.default_rng([room, layer, kv])
    return random.standard_normal((PROMPT_PAGES * PAGE, HEADS, DIM), np.float32).astype(np.float16)


class Worker:
    """One rank: its pool, its agent, and slots of pages for one prompt each."""

    def __init__(self, role: Literal["prefill", "decode"], rank: Rank) -> None:
        self.heads = slice(HEADS // rank.tp_size * rank.tp, HEADS // rank.tp_size * (rank.tp + 1))
        shape = (PAGES * PAGE, HEADS // rank.tp_size, DIM)
        self.kv = [[np.zeros(shape, np.float16) for _ in range(LAYERS)] for _ in "kv"]
        pool = KVPool.from_tensors(k=self.kv[0], v=self.kv[1], page_size=PAGE, total_kv_heads=HEADS)
        registry = os.environ["REGISTRY"]
        if role == "prefill" and rank.tp == 0:
            registry = f"tcp://{os.environ['POD_IP']}:{registry.rpartition(':')[2]}"
        self.agent = Agent(role=role, rank=rank, pool=pool, name=os.environ["NAME"], bootstrap=registry)
        self.slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(PAGES // PROMPT_PAGES):
            self.slots.put(slot)

    def pages(self, slot: int) -> list[int]:
        return list(range(slot * PROMPT_PAGES, (slot + 1) * PROMPT_PAGES))

    def rows(self, slot: int) -> slice:
        return slice(slot * PROMPT_PAGES * PAGE, (slot + 1) * PROMPT_PAGES * PAGE)

    def send(self, room: int) -> None:
        """Prefill: computes the prompt of a room and sends it; waits until its pages may be reused."""
        slot = self.slots.get(timeout=ROOM_S)
        try:
            send = self.agent.send(room)
            for kv in (0, 1):
                for layer in range(LAYERS):
                    self.kv[kv][layer][self.rows(slot)] = prompt(room, layer, kv)[:, self.heads]
            send.pages(self.pages(slot), last=True)
            send.finish()
            send.wait(ROOM_S)
        finally:
            self.slots.put(slot)

    def receive(self, room: int, prefill: list[str]) -> str:
        """Decode: transfers a room and returns its state, or `corrupt` if a byte is wrong."""
        slot = self.slots.get(timeout=ROOM_S)
        receive = self.agent.receive(room, self.pages(slot))
        for url in prefill:
            urllib.request.urlopen(f"{url}/prefill?room={room}", timeout=ROOM_S).close()
        state = receive.wait(ROOM_S).name
        if state == "SUCCESS":
            for kv in (0, 1):
                for layer in range(LAYERS):
                    if not np.array_equal(self.kv[kv][layer][self.rows(slot)], prompt(room, layer, kv)[:, self.heads]):
                        return "corrupt"
            self.slots.put(slot)  # a failed room's pages are not reused: something may still write to them
        return state


def serve_prefill(worker: Worker) -> ThreadingHTTPServer:
    """Starts the HTTP server that stands for the engine's own, on port 8000; answers at once."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            room = int(parse_qs(urlsplit(self.path).query)["room"][0])
            threading.Thread(target=worker.send, args=(room,), daemon=True).start()
            self.send_response(202)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((os.environ["POD_IP"], 8000), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def make_requests(worker: Worker, prefill: list[str], rate: float, stop: threading.Event) -> None:
    """Sends requests one after another until `stop`; none while the agent drains or is not ready."""
    counts: dict[str, int] = {}
    printed = time.monotonic()
    while not stop.wait(1 / rate):
        if worker.agent.accepting and worker.agent.waiting_for() is None:
            try:
                state = worker.receive(random.getrandbits(63), prefill)
            except OSError as error:
                state = f"{type(error).__name__}: {error}"
            counts[state] = counts.get(state, 0) + 1
        if time.monotonic() - printed >= 10:
            printed = time.monotonic()
            print(f"rooms: {counts}", flush=True)


def main() -> int:
    """Runs the rank until SIGTERM, which Kubernetes sends after the preStop hook has drained it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    role: Literal["prefill", "decode"] = "prefill" if os.environ["ROLE"] == "prefill" else "decode"
    rank = Rank(tp=int(os.environ.get("TP_RANK", 0)), tp_size=int(os.environ.get("TP_SIZE", 1)))
    worker = Worker(role, rank)
    with worker.agent.start():
        print(f"{worker.agent.name} has started", flush=True)
        if role == "prefill":
            server = serve_prefill(worker)
            stop.wait()
            server.shutdown()
            server.server_close()
        else:
            urls = os.environ["PREFILL_URLS"].split(",")
            make_requests(worker, urls, float(os.environ.get("REQUESTS_PER_SECOND", 5)), stop)
        print("stopped", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
