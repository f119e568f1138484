"""The KV pool of a vLLM worker, from the tensors that vLLM registers and its KV cache configuration.

The first KV cache group with full attention is the agent's KV, each other group of attention a KV group of the agent,
and a group of Mamba layers a state component, whose items are blocks. A tensor is `[blocks, heads, tokens, K|V]` in any
order of memory; groups of hybrid models share memory, but never a block.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import lcm
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvctl_agent import DraftKV, GroupTensors, KVPool, StateTensors
from kvctl_agent.integrations.vllm.block_formats import BlockFormat

# Kinds derived from these have contents of their own, which have not been looked at.
_KINDS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)


class WorkerPool:
    """The pool of one worker, and the page numbers in it of vLLM's blocks.

    Attributes:
        pool: the agent's pool.
        format: order of the elements in a block of the KV.
        ends_with_kv: whether the last layer is one of the agent's KV, not of another group.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], config: KVCacheConfig, total_kv_heads: int, cache_dtype: str = "auto"
    ) -> None:
        """Describes the tensors to the agent.

        Args:
            tensors: each layer's KV cache, by the layer's name.
            total_kv_heads: KV heads of the model, from its configuration.
            cache_dtype: vLLM's name of the dtype of the KV cache.

        Raises:
            ValueError: a group is of a kind that the connector does not support, which the text names, or this
                pipeline stage has no layer with full attention.
            MemoryLayoutError: a tensor is unusable; the text names the layer.
        """
        groups = config.transfer_groups
        check_groups(groups)
        self._main = next(n for n, group in enumerate(groups) if _is_full(group.kv_cache_spec))
        names = [sorted(group.layer_names, key=_layer_number) for group in groups]
        if not names[self._main]:
            raise ValueError(
                "kvctl's connector needs a layer with full attention in each pipeline stage: divide the layers "
                "differently with VLLM_PP_LAYER_PARTITION, or use tensor parallelism"
            )
        self.format = BlockFormat.of(
            tensors[names[self._main][0]], first_spec(groups[self._main].kv_cache_spec), cache_dtype
        )
        self._pages = [tensors[each[0]].shape[0] // config.num_blocks if each else 1 for each in names]
        self._page_tokens = [
            group.kv_cache_spec.block_size // count for group, count in zip(groups, self._pages, strict=True)
        ]
        places = {name: place for place, name in enumerate(names[self._main])}
        numbers = [_layer_number(name) for name in places]
        # For each layer the KV layer that is computed with it or next, or, after all of them, the last one. Some models
        # have two KV layers of one number.
        self._kv_layers = {
            name: places.get(name, min(sum(own < _layer_number(name) for own in numbers), len(numbers) - 1))
            for name in sorted(chain.from_iterable(names), key=_layer_number)
        }
        self.ends_with_kv = next(reversed(self._kv_layers)) in names[self._main]
        others = [
            GroupTensors(
                f"group{number}",
                self._kv(groups[number], names[number], tensors, total_kv_heads, cache_dtype),
                self._page_tokens[number],
                [self._kv_layers[name] for name in names[number]],
            )
            for number in range(len(groups))
            if number != self._main and names[number] and not is_state(groups[number])
        ]
        self._states = [number for number, group in enumerate(groups) if is_state(group)]
        states = [
            StateTensors(
                _state_name(number, first_spec(groups[number].kv_cache_spec)),
                [tensors[name].view(config.num_blocks, -1) for name in names[number]],
                [self._kv_layers[name] for name in names[number]],
            )
            for number in self._states
        ]
        main = self._main_kv = replace(
            self._kv(groups[self._main], names[self._main], tensors, total_kv_heads, cache_dtype),
            dtype=self.format.received,
        )
        self.pool = KVPool.from_tensors(
            main.k,
            main.v,
            total_kv_heads=main.total_kv_heads,
            page_size=self._page_tokens[self._main],
            axes=main.axes,
            dtype=main.dtype,
            groups=others,
            state=states,
            overlaid=bool(others or states),
        )

    def pages(self, blocks: Sequence[Sequence[int]], tokens: int = 0) -> tuple[list[int], list[list[int]]]:
        """Returns the page numbers of the blocks of each group: those of the KV, and those of the agent's KV groups.

        A block that vLLM's kernels divide is several pages.

        Args:
            tokens: tokens of the prompt on this rank, if the last block of each group is its last one, whose pages
                without any of them are left out; 0 if there are more blocks to come.
        """
        found = []
        for each, count, size in zip(blocks, self._pages, self._page_tokens, strict=True):
            pages = [block * count + n if block >= 0 else -1 for block in each for n in range(count)]
            found.append(pages[: len(pages) - -tokens % (count * size) // size])
        others = [pages for number, pages in enumerate(found) if number not in (self._main, *self._states)]
        return found[self._main], others

    def chunk_tokens(self, least: int) -> int:
        """Returns the smallest number of tokens, at least `least`, of whole pages of each group."""
        pages = lcm(*(size for number, size in enumerate(self._page_tokens) if number not in self._states))
        return -(-least // pages) * pages

    def states(self, blocks: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the items of each state component, from the blocks of each group."""
        return [list(blocks[number]) for number in self._states]

    def convert(self, pages: Sequence[int], received: str | None) -> bool:
        """As `BlockFormat.convert`, for pages of the KV."""
        return self.format.convert(self._main_kv.k, pages, received)

    def last_layers(self, groups: Sequence[range], first: int) -> dict[str, range]:
        """Returns the layer groups by the name of the layer with which vLLM has computed each.

        Args:
            first: first layer of this pipeline stage.
        """
        last = {group: name for name, layer in self._kv_layers.items() for group in groups if first + layer in group}
        return {name: group for group, name in last.items()}

    def _kv(
        self,
        group: KVCacheGroupSpec,
        names: Sequence[str],
        tensors: dict[str, torch.Tensor],
        total_kv_heads: int,
        cache_dtype: str,
    ) -> DraftKV:
        """Returns K and V of a group's layers, or its latents."""
        spec = first_spec(group.kv_cache_spec)
        layers = [tensors[name] for name in names]
        dtype = BlockFormat.of(layers[0], spec, cache_dtype).name
        if isinstance(spec, MLAAttentionSpec):
            four = layers[0].dim() == 4
            return DraftKV(layers, None, 1, axes="pages heads tokens dim" if four else "pages tokens dim", dtype=dtype)
        assert isinstance(spec, AttentionSpec)
        k, v = zip(*(self.format.split(layer, spec.head_size) for layer in layers), strict=True)
        return DraftKV(k, v, total_kv_heads, axes="pages heads tokens dim", dtype=dtype)


def check_groups(groups: Sequence[KVCacheGroupSpec]) -> None:
    """Checks that the connector supports the KV cache groups of a model.

    Raises:
        ValueError: it does not; the text names the first kind that it does not support.
    """
    for group in groups:
        spec = group.kv_cache_spec
        kinds = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
        for each in kinds:
            if type(each) not in _KINDS:
                raise ValueError(
                    f"kvctl's connector does not support the KV cache {type(each).__name__} of layer "
                    f"{group.layer_names[0]}: use one of vLLM's own connectors for this model"
                )
            if isinstance(each, MambaSpec) and each.mamba_cache_mode != "none":
                raise ValueError(
                    "kvctl's connector does not support a prefix cache of Mamba layers: set --no-enable-prefix-caching"
                )
    if not any(_is_full(group.kv_cache_spec) for group in groups):
        raise ValueError("kvctl's connector needs a layer with full attention: use one of vLLM's own connectors")


def first_spec(spec: Any) -> Any:
    """Returns the spec of a group's first layer; the others are of the same kind, with the same window."""
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def is_state(group: KVCacheGroupSpec) -> bool:
    """Whether a group has state of requests in place of KV: one block for each request."""
    return isinstance(first_spec(group.kv_cache_spec), MambaSpec)


def _state_name(number: int, spec: MambaSpec) -> str:
    """Returns the name of a state component, which is another if the bytes of its items have another meaning."""
    order = "dim_first" if is_conv_state_dim_first() else "dim_last"
    shapes = "_".join(
        f"{str(dtype).removeprefix('torch.')}_{'x'.join(map(str, shape))}"
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return f"state{number}_{order}_{shapes}"


def _is_full(spec: object) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_is_full, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


def _layer_number(name: str) -> int:
    """Returns the number in the name of a layer, such as 3 of `model.layers.3.self_attn.attn`."""
    return int(next(iter(re.findall(r"\.(\d+)\.", name)), 0))
