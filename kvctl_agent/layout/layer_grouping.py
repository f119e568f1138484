"""Into how many groups a forward's layers are cut, so that one group's KV moves while the next is computed.

With compute C, transfer T and N groups a forward takes about C + T/N where T < C, and C/N + T where T > C: every group
more hides more, and costs its own hand-over. Short prompts gain nothing, and some forwards cannot be cut at all; those
take the plain path, each for a reason that is counted and shown. The numbers are SGLang's, so that they mean the same
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvctl_agent.contract.pipeline import FEW_LAYERS, PIPELINE_MODES, PipelineMode
from kvctl_agent.errors import ConfigError
from kvctl_agent.layout.sizes import check_size, check_sizes

_MIN_SATURATION = 1.01  # keeps the slope finite


@dataclass(frozen=True, slots=True)
class ForwardInfo:
    """One forward batch, as far as it decides whether its layers may be cut.

    Attributes:
        tokens: New tokens of each request in the batch.
        split_forward: The engine can run this forward layer group by layer group.
        multimodal: Some request has images, audio or the like.
        attention_dp: Attention runs data parallel in this prefill instance.
        expert_balancing: Experts may be moved between forwards.
        draft: The forward is a draft or speculative worker's.
        input_embeddings: Some request gives embeddings in place of tokens.
        prefill_only: Some request has no decode side.

    Raises:
        LayoutError: `tokens` is no list of whole numbers.
    """

    tokens: tuple[int, ...]
    split_forward: bool = True
    multimodal: bool = False
    attention_dp: bool = False
    expert_balancing: bool = False
    draft: bool = False
    input_embeddings: bool = False
    prefill_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", check_sizes("tokens", self.tokens, minimum=0))

    @property
    def average_tokens(self) -> float:
        """Tokens per request; 0 for an empty batch."""
        return sum(self.tokens) / len(self.tokens) if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class GroupingOptions:
    """How layers are to be grouped; the configuration keys `pipeline` and `pipeline_*`.

    Attributes:
        mode: off, on (the formula), or measured.
        min_tokens: Average tokens from which it is worth it; 0 means 1.
        max_iters: Groups at `min_tokens`.
        min_iters: Groups from saturation on.
        group_size: Layers per group in place of threshold and formula.
        sat_multiplier: Saturation is at `min_tokens` times this.

    Raises:
        ConfigError: a number is out of range, or min_iters exceeds max_iters.
    """

    mode: PipelineMode = "off"
    min_tokens: int = 3072
    max_iters: int = 10
    min_iters: int = 4
    group_size: int | None = None
    sat_multiplier: float = 3.0

    def __post_init__(self) -> None:
        if self.mode not in PIPELINE_MODES:
            raise ConfigError(f"pipeline = {self.mode!r:.40}: it takes one of {', '.join(PIPELINE_MODES)}")
        for name, value, least in (
            ("pipeline_min_tokens", self.min_tokens, 0),
            ("pipeline_max_iters", self.max_iters, 1),
            ("pipeline_min_iters", self.min_iters, 1),
            ("pipeline_group_size", self.group_size, 1),
            ("pipeline_sat_multiplier", self.sat_multiplier, 0),
        ):
            if value is not None and not value >= least:
                raise ConfigError(f"{name} = {value}: it must be {least} or more")
        if self.min_iters > self.max_iters:
            raise ConfigError(
                f"pipeline_min_iters = {self.min_iters} exceeds pipeline_max_iters = {self.max_iters}: raise "
                "pipeline_max_iters or lower pipeline_min_iters"
            )


@dataclass(frozen=True, slots=True)
class Grouping:
    """The answer for one forward.

    Attributes:
        groups: Layers of each group as ascending global ids; together all of the rank's. Empty: do not pipeline.
        reason: A key of `contract.pipeline.REASONS`.
    """

    groups: tuple[range, ...]
    reason: str


Choose = Callable[[float, int, int], int]
"""(average tokens, layers, the formula's number of groups) -> number of groups, for mode measured."""


def group_layers(
    first_layer: int,
    num_layers: int,
    forward: ForwardInfo,
    options: GroupingOptions,
    choose: Choose | None = None,
) -> Grouping:
    """Cut a rank's layers for one forward, or say why not.

    A set `group_size` stands in for threshold and formula, in mode measured too. No other guard yields to it: each
    names something that cannot be cut, or that nobody waits for.

    Args:
        first_layer: Global id of the first layer that this rank (its pipeline stage) computes.
        num_layers: How many layers it computes.
        choose: Who knows better than the formula in mode measured; without one the formula decides.

    Raises:
        LayoutError: a layer number out of range.
    """
    check_size("first_layer", first_layer, minimum=0)
    check_size("num_layers", num_layers, minimum=0)
    obstacle = _obstacle(num_layers, forward, options)
    if obstacle is not None:
        return Grouping((), obstacle)
    if options.group_size is not None:
        size, reason = options.group_size, "override"
    elif options.mode == "measured" and choose is not None:
        wanted = choose(forward.average_tokens, num_layers, formula_groups(forward.average_tokens, num_layers, options))
        size, reason = -(-num_layers // max(1, wanted)), "measured"
    else:
        size, reason = formula_size(forward.average_tokens, num_layers, options), "formula"
    if size >= num_layers:
        return Grouping((), "one-group")
    end = first_layer + num_layers
    return Grouping(tuple(range(lo, min(lo + size, end)) for lo in range(first_layer, end, size)), reason)


def formula_size(average_tokens: float, num_layers: int, options: GroupingOptions) -> int:
    """Layers per group by the formula: fewer groups for longer prompts, from `max_iters` down to `min_iters`.

    Floor division may give more groups than `iters`, the last one smaller; that is kept as SGLang has it.
    """
    threshold = max(1, options.min_tokens)
    saturated = threshold * max(_MIN_SATURATION, options.sat_multiplier)
    along = min(1.0, max(0.0, (average_tokens - threshold) / (saturated - threshold)))
    iters = options.max_iters - along * (options.max_iters - options.min_iters)
    iters = min(float(options.max_iters), max(float(options.min_iters), iters))
    return max(1, num_layers // int(iters))


def formula_groups(average_tokens: float, num_layers: int, options: GroupingOptions) -> int:
    """Number of groups that the formula's size gives."""
    return -(-num_layers // formula_size(average_tokens, num_layers, options))


def _obstacle(num_layers: int, forward: ForwardInfo, options: GroupingOptions) -> str | None:
    """The first guard that holds."""
    if options.mode == "off":
        return "off"
    # An empty batch has no average, so it is not this guard's.
    few = forward.tokens and forward.average_tokens < max(1, options.min_tokens)
    guards = (
        ("few-tokens", bool(few) and options.group_size is None),
        ("few-layers", num_layers <= FEW_LAYERS),
        ("empty-batch", not forward.tokens),
        ("no-split-forward", not forward.split_forward),
        ("multimodal", forward.multimodal),
        ("attention-dp", forward.attention_dp),
        ("expert-balancing", forward.expert_balancing),
        ("draft", forward.draft),
        ("input-embeddings", forward.input_embeddings),
        ("prefill-only", forward.prefill_only),
    )
    return next((reason for reason, holds in guards if holds), None)
