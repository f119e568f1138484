"""Divides a forward pass into layer groups, so that the KV of one group is sent while the next group is computed.

With compute time C, transfer time T and N groups a forward takes about C + T/N if T < C, and C/N + T if T > C: each
further group hides more of the transfer but adds a fixed cost. Short prompts gain nothing, and some forwards cannot be
divided; their KV is sent after the whole forward, and the reason is counted and shown. The options have the names,
meanings and defaults of SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvctl_agent.contract.choices import FEW_LAYERS, PIPELINE_MODES, PipelineMode
from kvctl_agent.errors import ConfigError
from kvctl_agent.layout.sizes import check_size, check_sizes

_MIN_SATURATION = 1.01  # keeps the slope finite


@dataclass(frozen=True, slots=True)
class ForwardInfo:
    """Properties of a forward batch that determine whether its layers are grouped.

    Attributes:
        tokens: New tokens of each request in the batch.
        split_forward: The engine can run this forward one layer group at a time.
        multimodal: A request has images, audio or other non-text input.
        attention_dp: Attention runs data parallel in this prefill instance.
        expert_balancing: Experts may be moved between forwards.
        draft: The forward belongs to a draft or speculative worker.
        input_embeddings: A request supplies embeddings in place of tokens.
        prefill_only: A request has no decode side.

    Raises:
        LayoutError: `tokens` is not a list of whole numbers.
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
        """Mean number of new tokens per request; 0 for an empty batch."""
        return sum(self.tokens) / len(self.tokens) if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class GroupingOptions:
    """Options of layer grouping, the configuration keys `pipeline` and `pipeline_*`.

    Attributes:
        mode: off, on (number of groups by the formula), or auto (number of groups chosen from measured times).
        min_tokens: Batches with fewer tokens per request on average are not grouped; 0 means 1.
        max_iters: Number of groups at `min_tokens`.
        min_iters: Number of groups at and above saturation.
        group_size: Layers per group; if set, `min_tokens` and the formula are not used.
        sat_multiplier: Saturation is at `min_tokens * sat_multiplier` tokens per request.

    Raises:
        ConfigError: a number is out of range, or `min_iters` exceeds `max_iters`.
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
        for name, value, minimum in (
            ("pipeline_min_tokens", self.min_tokens, 0),
            ("pipeline_max_iters", self.max_iters, 1),
            ("pipeline_min_iters", self.min_iters, 1),
            ("pipeline_group_size", self.group_size, 1),
            ("pipeline_sat_multiplier", self.sat_multiplier, 0),
        ):
            if value is not None and not value >= minimum:
                raise ConfigError(f"{name} = {value}: it must be {minimum} or more")
        if self.min_iters > self.max_iters:
            raise ConfigError(
                f"pipeline_min_iters = {self.min_iters} exceeds pipeline_max_iters = {self.max_iters}: raise "
                "pipeline_max_iters or lower pipeline_min_iters"
            )


@dataclass(frozen=True, slots=True)
class Grouping:
    """The layer groups of one forward.

    Attributes:
        groups: Global layer ids of each group, ascending; together all layers of the rank. Empty if the layers are not
            grouped; in mode auto one group, so that the times of undivided forwards are measured.
        reason: Why the layers are or are not grouped: a key of `contract.choices.REASONS`.
    """

    groups: tuple[range, ...]
    reason: str


ChooseGroupCount = Callable[[float, int], int]
"""(average tokens, layers) -> number of groups, for mode auto."""


def group_layers(
    first_layer: int,
    num_layers: int,
    forward: ForwardInfo,
    options: GroupingOptions,
    choose: ChooseGroupCount | None = None,
) -> Grouping:
    """Divides a rank's layers into groups for one forward, or returns no groups and the reason.

    If `options.group_size` is set, it replaces the token threshold and the formula, in mode auto too. The other
    checks still apply, because they exclude forwards that cannot be divided or whose KV is not sent.

    Args:
        first_layer: Global id of the first layer that this rank's pipeline stage computes.
        num_layers: Number of layers that the stage computes.
        forward: The forward batch.
        options: The configuration.
        choose: Chooses the number of groups in mode auto; the formula decides if it is None.

    Raises:
        LayoutError: a layer number is out of range.
    """
    check_size("first_layer", first_layer, minimum=0)
    check_size("num_layers", num_layers, minimum=0)
    obstacle = _obstacle(num_layers, forward, options)
    if obstacle is not None:
        return Grouping((), obstacle)
    if options.group_size is not None:
        size, reason = options.group_size, "override"
    elif options.mode == "auto" and choose is not None:
        count = choose(forward.average_tokens, num_layers)
        if count <= 1:  # one group, whose times are measured
            return Grouping((range(first_layer, first_layer + num_layers),), "one-group")
        size, reason = -(-num_layers // count), "measured"
    else:
        size, reason = formula_size(forward.average_tokens, num_layers, options), "formula"
    if size >= num_layers:
        return Grouping((), "one-group")
    end = first_layer + num_layers
    return Grouping(tuple(range(lo, min(lo + size, end)) for lo in range(first_layer, end, size)), reason)


def formula_size(average_tokens: float, num_layers: int, options: GroupingOptions) -> int:
    """Returns the layers per group by the formula: longer prompts get fewer groups, from `max_iters` to `min_iters`.

    Because of floor division there may be more groups than the formula's number, and the last group is then smaller.
    SGLang divides in the same way.
    """
    threshold = max(1, options.min_tokens)
    saturated = threshold * max(_MIN_SATURATION, options.sat_multiplier)
    fraction = min(1.0, max(0.0, (average_tokens - threshold) / (saturated - threshold)))
    iters = options.max_iters - fraction * (options.max_iters - options.min_iters)
    iters = min(float(options.max_iters), max(float(options.min_iters), iters))
    return max(1, num_layers // int(iters))


def _obstacle(num_layers: int, forward: ForwardInfo, options: GroupingOptions) -> str | None:
    """Returns the first reason not to group the layers, a key of `contract.choices.REASONS`, or None."""
    if options.mode == "off":
        return "off"
    # An empty batch has no average; the reason for it is "empty-batch".
    few = forward.tokens and forward.average_tokens < max(1, options.min_tokens)
    checks = (
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
    return next((reason for reason, applies in checks if applies), None)
