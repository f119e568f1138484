"""The KV pool of a SGLang rank, from the addresses and item sizes in SGLang's KVArgs.

SGLang names its per-request state by component. Tensors of one component that differ in size, or are divided over
tensor-parallel ranks in different ways, are separate components here that share one list of items.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import is_mla_backend
from sglang.srt.runtime_context import get_device, get_parallel

from kvctl_agent import Buffer, DraftKV, KVPool, StateTensors
from kvctl_agent.integrations.sglang.unsupported import INSTEAD

_NHD = "nhd"
_AXES = "pages tokens heads dim"

# State components that are divided over tensor-parallel ranks as the KV heads are; MAMBA says so for each tensor. The
# others are whole on every rank.
_BY_HEADS = (StateType.SWA, StateType.BLOCK_SCALE, StateType.BLOCK_SCALE_SWA, StateType.MINIMAX_DENSE_KV)
# Components with an item for each page of the prompt after decode's prefix.
INDEX_ROWS = (StateType.DSA, StateType.MINIMAX_INDEX_K)
# Components whose items are not named by one list of item numbers.
_UNSUPPORTED = (StateType.DSA_TAIL, StateType.SWA_RING, StateType.DSV4_REQUEST_STATE)


class Facts(NamedTuple):
    """What SGLang's pools know and KVArgs lacks (on decode ranks the heads, on all the order of the axes).

    Attributes:
        draft_heads: KV heads of the draft model on this rank, 1 if it has latent rows; 0 without one.
        draft_mla: whether the draft model has latent rows.
        swa_heads: KV heads of this rank in the pool of sliding-window layers; 0 without one.
        nhd: whether a page is `[tokens, heads, dim]`, so that heads can be divided.
        swa_nhd: the same of sliding-window layers.
        element_bytes: bytes of an element as it is stored.
        kv_dtype: elements of the KV, and the order within a page if it is another one.
        draft_dtype, swa_dtype: the same of the draft model, and of sliding-window layers; "" without.
        state_dtypes: elements of Mamba state, by the address of each tensor.
    """

    heads: int
    total_heads: int
    draft_heads: int
    draft_mla: bool
    swa_heads: int
    nhd: bool
    swa_nhd: bool
    element_bytes: int
    kv_dtype: str
    draft_dtype: str
    swa_dtype: str
    state_dtypes: Mapping[int, str]


_facts: ContextVar[Facts | None] = ContextVar("facts", default=None)


@contextmanager
def announced(queue: Any) -> Iterator[None]:
    """Keeps the facts of a scheduler queue's pools for the manager that is created inside the context."""
    pool, draft = queue.token_to_kv_pool, queue.draft_token_to_kv_pool
    swa = getattr(pool, "swa_kv_pool", None)
    pool = getattr(pool, "full_kv_pool", pool)
    mamba: Any = getattr(queue.token_to_kv_pool, "mamba_pool", None)
    entries = mamba._iter_transfer_state_entries() if hasattr(mamba, "_iter_transfer_state_entries") else ()
    facts = Facts(
        heads=getattr(pool, "head_num", 1),
        total_heads=queue.scheduler.model_config.get_total_num_kv_heads(),
        draft_heads=getattr(draft, "head_num", 1) if draft is not None else 0,
        draft_mla=draft is not None and is_mla_backend(draft),
        swa_heads=getattr(swa, "head_num", 0),
        nhd=getattr(pool, "kv_cache_layout", None) == _NHD,
        swa_nhd=getattr(swa, "kv_cache_layout", None) == _NHD,
        element_bytes=pool.store_dtype.itemsize,
        kv_dtype=_dtype_of(pool),
        draft_dtype=_dtype_of(draft),
        swa_dtype=_dtype_of(swa),
        state_dtypes={tensor.data_ptr(): _name(tensor.dtype) for _, tensor, _, _ in entries},
    )
    token = _facts.set(facts)
    try:
        yield
    finally:
        _facts.reset(token)


def _dtype_of(pool: Any) -> str:
    """Returns the elements of a pool of SGLang, and the order of the axes of a page if it is not the usual one.

    The dtype is the logical one: SGLang stores fp8 as uint8.
    """
    if not hasattr(pool, "dtype"):
        return ""
    layout = getattr(pool, "kv_cache_layout", _NHD)
    return _name(pool.dtype) + f" {layout}" * (layout != _NHD)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def pool_of(args: Any, tp_size: int, *, mla: bool) -> tuple[KVPool, list[int]]:
    """Returns the pool of a rank.

    Args:
        mla: whether the KV is latent rows that every tensor-parallel rank has.

    Returns:
        The pool, and for each of its state components the number of SGLang's component that has its items.

    Raises:
        ValueError: a state component is of a kind that is not supported.
        MemoryLayoutError: a buffer or size is unusable; the text names the layer.
    """
    facts = _facts.get()
    if facts is None:
        raise ValueError("kvctl: SGLang's queues create their manager in another way than the plugin expects")
    mla = mla or bool(args.is_hybrid_mla_backend)
    gpu = get_device().gpu_id if get_device().device == "cuda" else None
    entries = list(_whole_items(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens))
    split = len(entries) - args.num_draft_entries
    kv, draft = entries[:split], entries[split:]
    page_size = args.page_size
    if mla:
        num_layers, heads, total_heads = len(kv), 1, 1
    elif facts.nhd:
        num_layers, heads, total_heads = len(kv) // 2, facts.heads, facts.total_heads
    else:  # a page is opaque, and only equal TP sizes fit
        num_layers, heads, total_heads = len(kv) // 2, 1, tp_size
    k, v = (kv, None) if mla else (kv[:num_layers], kv[num_layers:])
    state, components = _state(args, facts, tp_size, num_layers, gpu, mla=mla)
    pool = KVPool.from_tensors(
        _pages(k, page_size, heads, facts.element_bytes, gpu),
        _pages(v, page_size, heads, facts.element_bytes, gpu) if v is not None else None,
        page_size=page_size,
        total_kv_heads=total_heads,
        axes=_AXES,
        dtype=facts.kv_dtype,
        aux=list(zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens, strict=True)),
        draft=_draft(draft, page_size, facts, tp_size, gpu, mla=mla) if draft else None,
        state=state,
    )
    return pool, components


def _whole_items(
    addresses: Sequence[int], sizes: Sequence[int], items: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yields (address, nbytes, item_bytes) of each buffer, without a rest at its end that is no whole item."""
    for address, nbytes, item_bytes in zip(addresses, sizes, items, strict=True):
        yield address, nbytes // item_bytes * item_bytes, item_bytes


def _draft(
    entries: Sequence[tuple[int, int, int]], page_size: int, facts: Facts, tp_size: int, gpu: int | None, *, mla: bool
) -> DraftKV:
    """Returns the KV of the draft model; `mla` says whether the target model has latent rows."""
    heads, total_heads = 1, tp_size  # a page is opaque, and only equal TP sizes fit
    if not mla and facts.nhd and facts.draft_heads == facts.heads:
        heads, total_heads = facts.heads, facts.total_heads

    if facts.draft_mla:
        return DraftKV(_pages(entries, page_size, 1, 1, gpu), axes=_AXES, dtype=facts.draft_dtype)
    half = len(entries) // 2
    k, v = (_pages(part, page_size, heads, 1, gpu) for part in (entries[:half], entries[half:]))
    return DraftKV(k, v, total_heads, axes=_AXES, dtype=facts.draft_dtype)


def _pages(
    entries: Sequence[tuple[int, int, int]], page_size: int, heads: int, element_bytes: int, gpu: int | None
) -> list[Buffer]:
    """Returns the pages of each layer of K, V or latents, whose axes are `_AXES`."""
    return [
        Buffer(*each, (page_size, heads, each[2] // (page_size * heads * element_bytes)), element_bytes, gpu=gpu)
        for each in entries
    ]


class _Tensor(NamedTuple):
    """Geometry that the tensors of one state component share.

    Attributes:
        rows: rows of an item, before the divided dimension.
        heads: size of the divided dimension on this rank; 1 if every rank has the whole item.
        blocks: sizes over the whole model of the blocks of the divided dimension, which are divided one by one.
    """

    item_bytes: int
    rows: int
    heads: int
    blocks: tuple[int, ...]
    dtype: str = ""


def _state(
    args: Any, facts: Facts, tp_size: int, num_layers: int, gpu: int | None, *, mla: bool
) -> tuple[list[StateTensors], list[int]]:
    """Returns the state components of a rank, and the number of SGLang's component of each."""
    states: list[StateTensors] = []
    components: list[int] = []
    for number, kind in enumerate(args.state_types):
        if kind in _UNSUPPORTED:
            raise ValueError(
                f"kvctl's transfer backend does not support the per-request state {kind.value} of this model: {INSTEAD}"
            )
        layers = _kv_layers(args, number, num_layers)
        alike: dict[_Tensor, list[tuple[int, tuple[int, int, int]]]] = {}
        buffers = zip(
            args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number], strict=True
        )
        for index, (address, nbytes, item_bytes) in enumerate(buffers):
            if not nbytes:
                continue  # SGLang leaves out index rows of layers that share those of another
            tensor = _geometry(args, facts, tp_size, number, index, kind, item_bytes, mla=mla)
            dtype = facts.swa_dtype if kind == StateType.SWA else facts.state_dtypes.get(address, "")
            tensor = tensor._replace(dtype=dtype)
            alike.setdefault(tensor, []).append(
                (layers[index], (address, nbytes // item_bytes * item_bytes, item_bytes))
            )
        for tensor, found in alike.items():
            found.sort(key=lambda entry: entry[0])
            for block, total in enumerate(tensor.blocks):
                view = _view(tensor, block)
                states.append(
                    StateTensors(
                        f"{kind.value}_{len(states)}",
                        [Buffer(*each, **view, gpu=gpu) for _, each in found],
                        [layer for layer, _ in found],
                        heads=total,
                        axis=2 if total > 1 else None,
                        dtype=tensor.dtype,
                    )
                )
                components.append(number)
    return states, components


def _geometry(
    args: Any, facts: Facts, tp_size: int, number: int, index: int, kind: Any, item_bytes: int, *, mla: bool
) -> _Tensor:
    """Returns the geometry of tensor `index` of SGLang's state component `number`."""
    whole = _Tensor(item_bytes, 1, 1, (1,))
    if kind == StateType.MAMBA:
        heads = _at(args.state_dim_per_tensor, number, index, 1)
        if not heads:
            return whole
        rows = _at(args.state_slice_outer_counts, number, index, 1)
        blocks = tuple(_at(args.state_conv_shard_groups, number, index, None) or ())
        return _Tensor(item_bytes, rows, heads, blocks if sum(blocks) == heads * tp_size else (heads * tp_size,))
    if mla or kind not in _BY_HEADS:
        return whole
    if kind == StateType.SWA and facts.swa_nhd and facts.swa_heads == facts.heads:
        return _Tensor(item_bytes, args.page_size, facts.heads, (facts.total_heads,))
    return _Tensor(item_bytes, 1, 1, (tp_size,))  # an item is opaque, and only equal TP sizes fit


def _view(tensor: _Tensor, block: int) -> dict[str, Any]:
    """Returns the part of each item that one block of the divided dimension has, as arguments of `Buffer`."""
    if tensor.blocks == (1,):
        return {"shape": (tensor.item_bytes,)}
    head_bytes = tensor.item_bytes // (tensor.rows * tensor.heads)
    ranks = max(1, sum(tensor.blocks) // tensor.heads)
    sizes = [max(1, size // ranks) for size in tensor.blocks]
    return {
        "shape": (tensor.rows, sizes[block], head_bytes),
        "strides": (tensor.heads * head_bytes, head_bytes, 1),
        "offset": sum(sizes[:block]) * head_bytes,
    }


def _at(table: Sequence[Sequence[Any]], number: int, index: int, default: Any) -> Any:
    """Returns the entry of tensor `index` of component `number`; `default` if SGLang gives none for the component."""
    row = table[number] if number < len(table) else ()
    return row[index] if index < len(row) else default


def _kv_layers(args: Any, number: int, num_layers: int) -> list[int]:
    """Returns the KV layer of this stage beside which each tensor of SGLang's component `number` is computed.

    Raises:
        ValueError: SGLang does not say which layers the tensors belong to, and there are several pipeline stages.
    """
    count = len(args.state_data_ptrs[number])
    ids, kv_ids = args.state_layer_ids[number], list(args.kv_layer_ids or ())[:num_layers]
    if ids and kv_ids:
        # Models repeat a pattern of layers that begins or ends with attention, and stages hold whole patterns.
        if min(kv_ids) <= min(ids):
            return [bisect_right(kv_ids, layer) - 1 for layer in ids]
        return [min(bisect_left(kv_ids, layer), num_layers - 1) for layer in ids]
    if count == num_layers:
        return list(range(count))
    if get_parallel().pp_size > 1:
        raise ValueError(
            f"kvctl's transfer backend cannot tell the layers of {args.state_types[number].value} apart between "
            f"pipeline stages: {INSTEAD}"
        )
    return [0] * count
