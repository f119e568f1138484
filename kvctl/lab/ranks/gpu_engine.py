"""Moments of the stream that a rank computes on: events of a GPU for the agent, and times on the monotonic clock."""

from __future__ import annotations

import importlib
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from kvctl.lab.ranks.compute import Computed
from kvctl.lab.ranks.plan import PlannedShape
from kvctl_agent.errors import DeadlineExceeded, DeviceUnavailable
from kvctl_agent.layout.parallel import ParallelConfig


class Timeline(ABC):
    """A stream."""

    @abstractmethod
    def mark(self) -> Any:
        """The moment behind everything that was put on it so far."""

    @abstractmethod
    def event(self, mark: Any) -> Any:
        """What the agent is given for it; None where the moment has come when it is marked."""

    @abstractmethod
    def passed(self, mark: Any) -> bool:
        """Whether the stream has come so far; never waits."""

    @abstractmethod
    def at_ns(self, mark: Any) -> int:
        """When that was, of a passed mark."""

    @abstractmethod
    def anchor(self) -> None:
        """Waits until all is done, and compares the clocks anew: once before a run."""


class HostTimeline(Timeline):
    """Computes at once."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def event(self, mark: Any) -> None:
        return None

    def passed(self, mark: Any) -> bool:
        return True

    def at_ns(self, mark: Any) -> int:
        return int(mark)

    def anchor(self) -> None:
        """There is one clock."""


class CudaTimeline(Timeline):
    """A stream of a GPU, which is the current one of this thread from now on."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self._stream)
        self.anchor()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def event(self, mark: Any) -> Any:
        return mark

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def at_ns(self, mark: Any) -> int:
        # A float of milliseconds: to a microsecond in the first seconds, to 30 µs after minutes.
        return self._anchor_ns + round(float(self._anchor.elapsed_time(mark)) * 1e6)

    def anchor(self) -> None:
        self._stream.synchronize()
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()


def timeline_of(torch: Any, device: str) -> Timeline:
    """Of a device by torch's name for it."""
    return CudaTimeline(torch, device) if device.startswith("cuda") else HostTimeline()


# DeepSeek's latent attention: q_lora_rank; the rotary part of the latent; qk_nope_head_dim + rotary, and v_head_dim.
_Q_LORA, _ROPE, _NOPE, _V = 1536, 64, 128, 128


class LayerWork(NamedTuple):
    """One rank's share of one layer.

    Attributes:
        products: (width in, width out) of each weight that every token is multiplied with.
        q_heads, kv_heads, head_dim: of attention; a narrower V is padded, as engines do.
    """

    products: tuple[tuple[int, int], ...]
    q_heads: int
    kv_heads: int
    head_dim: int

    def flops(self, tokens: int, before: int) -> int:
        """Floating-point operations for so many tokens behind `before` others."""
        weights = sum(width * out for width, out in self.products)
        seen = tokens * before + tokens * (tokens + 1) // 2
        return 2 * tokens * weights + 4 * self.q_heads * self.head_dim * seen


def layer_work(shape: PlannedShape, side: ParallelConfig) -> LayerWork:
    """The share of a rank of an instance of these sizes; `shape` has widths."""
    widths, tp = shape["widths"], side.tp
    hidden, q_heads = widths["hidden"], max(1, widths["q_heads"] // tp)
    intermediate = max(1, widths["intermediate"] // tp)
    mlp = ((hidden, 2 * intermediate), (intermediate, hidden))
    attention: tuple[tuple[int, int], ...]
    if shape["kind"] == "mla":
        latent = shape["head_dim"]
        attention = (
            (hidden, _Q_LORA + latent),
            (_Q_LORA, q_heads * (_NOPE + _ROPE)),
            (latent - _ROPE, q_heads * (_NOPE + _V)),
            (q_heads * _V, hidden),
        )
        return LayerWork(attention + mlp, q_heads, q_heads, _NOPE + _ROPE)
    kv_heads, dim = max(1, shape["kv_heads"] // tp), shape["head_dim"]
    # Where several ranks hold a head of KV, whole groups of query heads go with it.
    q_heads = max(1, q_heads // kv_heads) * kv_heads
    attention = ((hidden, (q_heads + 2 * kv_heads) * dim), (q_heads * dim, hidden))
    return LayerWork(attention + mlp, q_heads, kv_heads, dim)


def import_torch() -> Any:
    """PyTorch, which a rank's process keeps out until somebody computes.

    Raises:
        DeviceUnavailable: it is not installed.
    """
    if sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceUnavailable(f"--compute gpu needs PyTorch ({error}): pip install torch") from error


class TorchLayer:
    """Weights, and memory for what goes in and comes out: nothing is allocated while a forward runs.

    Products take what happens to be in memory for their input: what is computed does not matter, that it takes the
    time it takes does.
    """

    def __init__(self, work: LayerWork, device: str, tokens: int, prompt: int) -> None:
        """
        Args:
            device: as torch names it: "cuda:0", "cpu".
            tokens: most of one chunk.
            prompt: most of one prompt.
        """
        torch = self._torch = import_torch()
        self.work = work
        self.tokens, self.prompt = tokens, prompt
        options = {"device": device, "dtype": torch.bfloat16}
        random = torch.Generator(device=device).manual_seed(0)

        def values(*sizes: int) -> Any:
            return torch.randn(*sizes, generator=random, **options)

        # Outputs of unit variance, as behind a norm.
        self._weights = [values(width, out) / width**0.5 for width, out in work.products]
        self._inputs = {width: values(tokens, width) for width, _ in work.products}
        self._outputs = {out: torch.empty(tokens, out, **options) for _, out in work.products}
        self._q = values(1, work.q_heads, tokens, work.head_dim)
        self._k, self._v = (values(1, work.kv_heads, prompt, work.head_dim) for _ in "kv")

    def compute(self, tokens: int, before: int) -> None:
        """Puts one layer of a chunk of so many tokens, behind `before` others of its prompt, on the current stream."""
        torch = self._torch
        with torch.inference_mode():
            for weight in self._weights:
                width, out = weight.shape
                torch.mm(self._inputs[width][:tokens], weight, out=self._outputs[out][:tokens])
            # In two, whose sum is the same work: every fast kernel knows a square mask, few one behind a prefix.
            if before:
                self._attend(tokens, slice(before), False)
            self._attend(tokens, slice(before, before + tokens), True)

    def _attend(self, tokens: int, seen: slice, causal: bool) -> None:
        self._torch.nn.functional.scaled_dot_product_attention(
            self._q[:, :, :tokens],
            self._k[:, :, seen],
            self._v[:, :, seen],
            is_causal=causal,
            enable_gqa=self.work.q_heads != self.work.kv_heads,
        )


# Forwards on the stream at once: the next one is there when the first ends, as engines do it.
_AHEAD = 2
# Lengths of prompts that are measured; what lies between is between.
_LENGTHS = 8
_ALONE_ROUNDS = 5
# At least: ranks that share a GPU measure at about the same time, so that what they do to each other is in it.
_ALONE_S = 0.5


class GpuEngine:
    """The engine of one prefill rank."""

    def __init__(self, work: LayerWork, device: str, layers: int, chunk_tokens: int, share: int = 1) -> None:
        """
        Args:
            work: of one layer.
            device: as torch names it.
            layers: of this rank.
            chunk_tokens: most tokens of a chunk.
            share: ranks among which every chunk's tokens are divided.
        """
        self._work = work
        self._device = device
        self._layers = layers
        self._chunk_tokens = chunk_tokens
        self._share = share
        self.timeline = timeline_of(import_torch(), device)
        self._layer = TorchLayer(work, device, self._part(chunk_tokens), chunk_tokens)
        self._under_way: deque[Any] = deque()
        self._alone: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        while self._under_way and self.timeline.passed(self._under_way[0]):
            self._under_way.popleft()
        return len(self._under_way) < _AHEAD

    def prepare(self, prompts: Iterable[int]) -> None:
        """Before a run, while nothing is sent: makes room for these prompts, and measures what they take alone."""
        lengths = sorted(set(prompts))
        if lengths and lengths[-1] > self._layer.prompt:
            self._layer = TorchLayer(self._work, self._device, self._part(self._chunk_tokens), lengths[-1])
        step = max(1, -(-len(lengths) // _LENGTHS))
        for tokens in {*lengths[::step], *lengths[-1:]} - self._alone.keys():
            self._forward(tokens)  # the first one loads kernels
            until = time.monotonic() + _ALONE_S
            took: list[int] = []
            while len(took) < _ALONE_ROUNDS or time.monotonic() < until:
                took.append(self._timed(tokens))
            self._alone[tokens] = round(median(took))
        self._under_way.clear()
        self.timeline.anchor()

    def alone_ns(self, tokens: int) -> int:
        """What a forward of so many tokens takes while nothing is sent: measured, or between two that were."""
        known = sorted(self._alone)
        below = max((each for each in known if each <= tokens), default=known[0])
        above = min((each for each in known if each >= tokens), default=known[-1])
        if above == below:
            return self._alone[below]
        part = (tokens - below) / (above - below)
        return round(self._alone[below] + part * (self._alone[above] - self._alone[below]))

    def begin(self, asked_ns: int, chunks: int, deadline_ns: int) -> GpuJob:
        return GpuJob(self, chunks * self._layers, deadline_ns)

    def put(self, tokens: int, before: int, layers: int) -> Any:
        """Puts layers of a chunk behind `before` tokens of its prompt on the stream; the mark behind them."""
        for _ in range(layers):
            self._layer.compute(self._part(tokens), before)
        return self.timeline.mark()

    def submitted(self, mark: Any) -> None:
        """A whole forward is on the stream, up to this mark."""
        self._under_way.append(mark)

    def _part(self, tokens: int) -> int:
        return -(-tokens // self._share)

    def _forward(self, tokens: int) -> tuple[Any, Any]:
        begin = end = self.timeline.mark()
        for before in range(0, tokens, self._chunk_tokens):
            end = self.put(min(self._chunk_tokens, tokens - before), before, self._layers)
        return begin, end

    def _timed(self, tokens: int) -> int:
        begin, end = self._forward(tokens)
        self.timeline.anchor()
        return self.timeline.at_ns(end) - self.timeline.at_ns(begin)


class GpuJob:
    """One room's forward."""

    def __init__(self, engine: GpuEngine, steps: int, deadline_ns: int) -> None:
        """`steps`: layers of all chunks together."""
        if time.monotonic_ns() >= deadline_ns:
            raise DeadlineExceeded("its forward was not begun at the run's deadline")
        self._engine = engine
        self._left = steps
        self._before = 0
        self._begun = self._end = engine.timeline.mark()
        self._chunk = 0
        self._tokens = 0

    def compute(self, chunk: int, tokens: int, first: int, end: int) -> Any:
        if chunk != self._chunk:
            self._before += self._tokens
        self._chunk, self._tokens = chunk, tokens
        self._end = self._engine.put(tokens, self._before, end - first)
        self._left -= end - first
        if not self._left:
            self._engine.submitted(self._end)
        return self._engine.timeline.event(self._end)

    def computed(self) -> Computed:
        timeline = self._engine.timeline
        started_ns, done_ns = timeline.at_ns(self._begun), timeline.at_ns(self._end)
        return Computed(started_ns, done_ns, done_ns - started_ns)
