"""Computes prompts on a GPU, beside the pool, so that the effect of transfers on computation and vice versa shows.

A run only submits work to a stream; the agent waits for its events. Tensor-parallel ranks of an instance that share a
GPU compete for it; pipeline stages do not wait for each other. PyTorch is imported when an engine is made.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

from kvctl.lab.ranks.compute import Computed
from kvctl.lab.ranks.plan import PlannedShape
from kvctl_agent.errors import DeadlineExceeded, DeviceUnavailable
from kvctl_agent.layout.parallel import ParallelConfig

# Forwards submitted at once: the next one is on the stream when the first ends, as in engines.
_MAX_SUBMITTED = 2
# Number of prompt lengths that are measured; others are interpolated.
_MEASURED_LENGTHS = 8
_MIN_ROUNDS = 5
# Minimum time of a measurement: ranks that share a GPU measure at about the same time, so that it includes their
# effect on each other.
_MIN_MEASURED_S = 0.5

# DeepSeek's latent attention: q_lora_rank; the rotary part of the latent; qk_nope_head_dim + rotary, and v_head_dim.
_Q_LORA, _ROPE, _NOPE, _V = 1536, 64, 128, 128


class LayerWork(NamedTuple):
    """One rank's computation for one layer of a prefill: matrix products and attention of the model's sizes.

    Norms, activations, rotary embedding, the router and reductions between tensor-parallel ranks are left out: a
    forward spends little time on them, or waits. All experts of a token are one product of their combined width.

    Attributes:
        products: (width in, width out) of each weight that every token is multiplied with.
        q_heads, kv_heads, head_dim: of attention; a narrower V is padded, as in engines.
    """

    products: tuple[tuple[int, int], ...]
    q_heads: int
    kv_heads: int
    head_dim: int


def layer_work(shape: PlannedShape, side: ParallelConfig) -> LayerWork:
    """Returns the work of a rank of an instance of these sizes; `shape` has widths."""
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
    # If several ranks hold the same KV head, each has whole groups of query heads.
    q_heads = max(1, q_heads // kv_heads) * kv_heads
    attention = ((hidden, (q_heads + 2 * kv_heads) * dim), (q_heads * dim, hidden))
    return LayerWork(attention + mlp, q_heads, kv_heads, dim)


def import_torch() -> Any:
    """Imports PyTorch, which the rank process has blocked until now.

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
    """Computes one layer with PyTorch; one set of random weights stands for all layers.

    Products take their input from preallocated memory, and nothing is allocated while a forward runs. The values do not
    matter, only the time.
    """

    def __init__(self, work: LayerWork, device: str, tokens: int, prompt: int) -> None:
        """
        Args:
            device: torch's name: "cuda:0", "cpu".
            tokens: maximum of one chunk.
            prompt: maximum of one prompt.
        """
        torch = self._torch = import_torch()
        self.work = work
        self.tokens, self.prompt = tokens, prompt
        options = {"device": device, "dtype": torch.bfloat16}
        random = torch.Generator(device=device).manual_seed(0)

        def values(*sizes: int) -> Any:
            return torch.randn(*sizes, generator=random, **options)

        # Outputs have unit variance, as after a norm.
        self._weights = [values(width, out) / width**0.5 for width, out in work.products]
        self._inputs = {width: values(tokens, width) for width, _ in work.products}
        self._outputs = {out: torch.empty(tokens, out, **options) for _, out in work.products}
        self._q = values(1, work.q_heads, tokens, work.head_dim)
        self._k, self._v = (values(1, work.kv_heads, prompt, work.head_dim) for _ in "kv")

    def compute(self, tokens: int, before: int) -> None:
        """Submits one layer of a chunk of `tokens` that follows `before` others to the current stream."""
        torch = self._torch
        with torch.inference_mode():
            for weight in self._weights:
                width, out = weight.shape
                torch.mm(self._inputs[width][:tokens], weight, out=self._outputs[out][:tokens])
            # In two calls with the same total work: every fast kernel supports a square mask, few one after a prefix.
            if before:
                self._attend(tokens, slice(before), False)
            self._attend(tokens, slice(before, before + tokens), True)

    def _attend(self, tokens: int, keys: slice, causal: bool) -> None:
        self._torch.nn.functional.scaled_dot_product_attention(
            self._q[:, :, :tokens],
            self._k[:, :, keys],
            self._v[:, :, keys],
            is_causal=causal,
            enable_gqa=self.work.q_heads != self.work.kv_heads,
        )


class Timeline:
    """Events of a device and their times on the monotonic clock; here of a device that computes synchronously."""

    def mark(self) -> Any:
        """Returns a mark after everything that has been submitted so far."""
        return time.monotonic_ns()

    def event(self, mark: Any) -> Any:
        """Returns the event to pass to the agent; None if the work is done when it is submitted."""
        return None

    def passed(self, mark: Any) -> bool:
        """Whether the device has reached the mark; never waits."""
        return True

    def at_ns(self, mark: Any) -> int:
        """Returns the time of a passed mark."""
        return int(mark)

    def anchor(self) -> None:
        """Waits until all work is done and synchronises the clocks; once before a run."""


class CudaTimeline(Timeline):
    """A stream of a GPU, which becomes the current stream of this thread."""

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
        # elapsed_time is a float of milliseconds: exact to 1 µs in the first seconds, to 30 µs after minutes.
        return self._anchor_ns + round(float(self._anchor.elapsed_time(mark)) * 1e6)

    def anchor(self) -> None:
        self._stream.synchronize()
        self._anchor = self.mark()
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()


def timeline_of(torch: Any, device: str) -> Timeline:
    """Returns the timeline of a device given by torch's name."""
    return CudaTimeline(torch, device) if device.startswith("cuda") else Timeline()


class GpuEngine:
    """The engine of one prefill rank."""

    def __init__(self, work: LayerWork, device: str, layers: int, chunk_tokens: int, share: int = 1) -> None:
        """
        Args:
            work: of one layer.
            device: torch's name.
            layers: number of layers of this rank.
            chunk_tokens: maximum tokens of a chunk.
            share: number of ranks that split every chunk's tokens.
        """
        self._work = work
        self._device = device
        self._layers = layers
        self._chunk_tokens = chunk_tokens
        self._share = share
        self.timeline = timeline_of(import_torch(), device)
        self._layer = TorchLayer(work, device, self._part(chunk_tokens), chunk_tokens)
        self._submitted: deque[Any] = deque()
        self._alone: dict[int, int] = {}

    @property
    def ready(self) -> bool:
        while self._submitted and self.timeline.passed(self._submitted[0]):
            self._submitted.popleft()
        return len(self._submitted) < _MAX_SUBMITTED

    def prepare(self, prompts: Iterable[int]) -> None:
        """Allocates memory for these prompts and measures their forwards while nothing is sent; before a run."""
        lengths = sorted(set(prompts))
        if lengths and lengths[-1] > self._layer.prompt:
            self._layer = TorchLayer(self._work, self._device, self._part(self._chunk_tokens), lengths[-1])
        step = max(1, -(-len(lengths) // _MEASURED_LENGTHS))
        for tokens in {*lengths[::step], *lengths[-1:]} - self._alone.keys():
            self._forward(tokens)  # the first one loads kernels
            until = time.monotonic() + _MIN_MEASURED_S
            durations: list[int] = []
            while len(durations) < _MIN_ROUNDS or time.monotonic() < until:
                durations.append(self._timed(tokens))
            self._alone[tokens] = round(median(durations))
        self._submitted.clear()
        self.timeline.anchor()

    def alone_ns(self, tokens: int) -> int:
        """Returns the duration of a forward while nothing is sent, measured or interpolated."""
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
        """Submits layers of a chunk that follows `before` tokens of its prompt; returns the mark after them."""
        for _ in range(layers):
            self._layer.compute(self._part(tokens), before)
        return self.timeline.mark()

    def submitted(self, mark: Any) -> None:
        """Records that a whole forward has been submitted, up to this mark."""
        self._submitted.append(mark)

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
        self._begin = self._end = engine.timeline.mark()
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
        started_ns, done_ns = timeline.at_ns(self._begin), timeline.at_ns(self._end)
        return Computed(started_ns, done_ns, done_ns - started_ns)
