"""Synthetic prefill on a GPU, to measure how transfers slow down computation and the reverse.

The forward of a room is only submitted to a CUDA stream; the agent waits for the recorded events before it sends.
Tensor-parallel ranks of an instance that share a GPU compete for it; pipeline stages do not wait for each other.
PyTorch is imported when a `GpuEngine` is created.
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
from kvctl_agent.errors import DeviceUnavailable
from kvctl_agent.layout.parallel import ParallelConfig

# Forwards in the stream at a time: as in engines, the next one is already submitted when one ends.
_MAX_SUBMITTED = 2
# Number of prompt lengths that are measured; durations for other lengths are interpolated.
_MEASURED_LENGTHS = 8
_MIN_ROUNDS = 5
# Minimum time of a measurement: ranks that share a GPU measure at about the same time, so that it includes their
# effect on each other.
_MIN_MEASURED_S = 0.5

# DeepSeek's latent attention: q_lora_rank; the rotary part of the latent; qk_nope_head_dim + rotary, and v_head_dim.
_Q_LORA, _ROPE, _NOPE, _V = 1536, 64, 128, 128


class LayerWork(NamedTuple):
    """Computation of one layer on one prefill rank: matrix products and attention of the model's sizes.

    Norms, activations, rotary embedding and the MoE router are left out because they take little time, reductions
    between tensor-parallel ranks because they mostly wait. The experts that compute a token are
    simulated by one product of their combined width.

    Attributes:
        products: (input width, output width) of each weight matrix.
        q_heads, kv_heads: number of attention heads on this rank.
        head_dim: width of an attention head; a narrower V is padded to it, as in engines.
    """

    products: tuple[tuple[int, int], ...]
    q_heads: int
    kv_heads: int
    head_dim: int


def layer_work(shape: PlannedShape, side: ParallelConfig) -> LayerWork:
    """Returns the computation per layer of a rank of an instance.

    Args:
        shape: model shape, with `widths`.
        side: parallel sizes of the instance.
    """
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
    """Imports PyTorch, after removing the block that `python -m kvctl.lab.ranks` puts on the import.

    Raises:
        DeviceUnavailable: PyTorch is not installed.
    """
    if sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceUnavailable(f"--compute gpu needs PyTorch ({error}): pip install torch") from error


class TorchLayer:
    """Computes one layer with PyTorch; all layers of the model use the same random weights.

    Inputs and outputs of the matrix products are preallocated. Only the time matters, not the result.
    """

    def __init__(self, work: LayerWork, device: str, tokens: int, prompt: int) -> None:
        """Allocates weights and buffers.

        Args:
            device: torch's name of the device, such as "cuda:0" or "cpu".
            tokens: maximum number of tokens of one chunk on this rank.
            prompt: maximum number of tokens of one prompt.
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
        """Submits one layer for a chunk of `tokens` tokens, after `before` earlier tokens, to the current stream."""
        torch = self._torch
        with torch.inference_mode():
            for weight in self._weights:
                width, out = weight.shape
                torch.mm(self._inputs[width][:tokens], weight, out=self._outputs[out][:tokens])
            # Two calls with the same total work: every fast kernel supports a square causal mask, but few support a
            # causal mask after a prefix.
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
    """Records marks in the work submitted to a device and reads their times on the monotonic clock.

    This base class is for the CPU, where work is complete when the call that submits it returns.
    """

    def mark(self) -> Any:
        """Records and returns a mark behind all work submitted so far."""
        return time.monotonic_ns()

    def event(self, mark: Any) -> Any:
        """Returns the GPU event of a mark, for the agent to wait for; None on the CPU."""
        return None

    def passed(self, mark: Any) -> bool:
        """Whether the device has completed the work before the mark; never waits."""
        return True

    def at_ns(self, mark: Any) -> int:
        """Returns the time at which the device passed a mark; it must have passed it."""
        return int(mark)

    def anchor(self) -> None:
        """Waits until all submitted work is complete and relates the device's clock to the monotonic clock."""


class CudaTimeline(Timeline):
    """Timeline of a new CUDA stream, which becomes the current stream of this thread; marks are CUDA events."""

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
    """Returns a timeline for a device, given by torch's name such as "cuda:0" or "cpu"."""
    return CudaTimeline(torch, device) if device.startswith("cuda") else Timeline()


class GpuEngine:
    """Engine that computes the forwards of one prefill rank on its GPU."""

    def __init__(self, work: LayerWork, device: str, layers: int, chunk_tokens: int, share: int = 1) -> None:
        """Imports PyTorch and allocates weights and buffers.

        Args:
            work: computation of one layer on this rank.
            device: torch's name of the device.
            layers: number of layers of this rank.
            chunk_tokens: maximum number of tokens of a chunk.
            share: number of context-parallel ranks that split the tokens of every chunk.
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
        """Prepares a run: allocates buffers for these prompt lengths and times their forwards without transfers."""
        lengths = sorted(set(prompts))
        if lengths and lengths[-1] > self._layer.prompt:
            self._layer = TorchLayer(self._work, self._device, self._part(self._chunk_tokens), lengths[-1])
        step = max(1, -(-len(lengths) // _MEASURED_LENGTHS))
        for tokens in {*lengths[::step], *lengths[-1:]} - self._alone.keys():
            self._forward(tokens)  # the first forward loads kernels
            until = time.monotonic() + _MIN_MEASURED_S
            durations: list[int] = []
            while len(durations) < _MIN_ROUNDS or time.monotonic() < until:
                durations.append(self._timed(tokens))
            self._alone[tokens] = round(median(durations))
        self._submitted.clear()
        self.timeline.anchor()

    def alone_ns(self, tokens: int) -> int:
        """Returns the duration of a forward of this prompt length without transfers, measured or interpolated."""
        known = sorted(self._alone)
        below = max((each for each in known if each <= tokens), default=known[0])
        above = min((each for each in known if each >= tokens), default=known[-1])
        if above == below:
            return self._alone[below]
        part = (tokens - below) / (above - below)
        return round(self._alone[below] + part * (self._alone[above] - self._alone[below]))

    def begin(self, asked_ns: int, chunks: int) -> GpuJob:
        return GpuJob(self, chunks * self._layers)

    def put(self, tokens: int, before: int, layers: int) -> Any:
        """Submits the computation of a chunk in a number of layers; returns a timeline mark recorded after it.

        Args:
            tokens: number of tokens of the chunk.
            before: number of tokens of the prompt before the chunk.
            layers: number of layers to compute.
        """
        for _ in range(layers):
            self._layer.compute(self._part(tokens), before)
        return self.timeline.mark()

    def submitted(self, mark: Any) -> None:
        """Records that a whole forward, whose last mark is `mark`, has been submitted."""
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
    """Forward of one room's prompt on a GPU."""

    def __init__(self, engine: GpuEngine, steps: int) -> None:
        """Records a timeline mark at the start of the forward; `steps` is the number of chunks times that of layers."""
        self._engine = engine
        self._left = steps
        self._before = 0
        self._begin = self._end = engine.timeline.mark()
        self._chunk = 0
        self._tokens = 0

    def due_ns(self, chunk: int, end: int) -> int:
        return 0  # submitted at once

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
